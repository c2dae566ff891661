BEGIN TRANSACTION;
CREATE TABLE log_feedback (
	id INTEGER NOT NULL, 
	run_id TEXT NOT NULL, 
	turn INTEGER, 
	span_start INTEGER, 
	span_end INTEGER, 
	kind TEXT NOT NULL, 
	value DOUBLE, 
	text TEXT, 
	author TEXT, 
	created DOUBLE NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES log_runs (id)
);
CREATE TABLE log_runs (
	id TEXT NOT NULL, 
	task_id TEXT NOT NULL, 
	policy TEXT NOT NULL, 
	profile TEXT NOT NULL, 
	profile_hash TEXT NOT NULL, 
	template_hash TEXT NOT NULL, 
	tools_hash TEXT NOT NULL, 
	runtime_version TEXT NOT NULL, 
	parent TEXT, 
	seed TEXT, 
	snapshot TEXT, 
	started DOUBLE NOT NULL, 
	ended DOUBLE, 
	stop TEXT, 
	stop_detail TEXT, 
	answer TEXT, 
	diff TEXT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(task_id) REFERENCES log_tasks (id)
);
INSERT INTO "log_runs" VALUES('run1','sha256:1','policy','profile','profile_hash','template_hash','tools_hash','runtime_version',NULL,NULL,NULL,1.0,NULL,NULL,NULL,NULL,'');
CREATE TABLE log_tasks (
	id TEXT NOT NULL, 
	"key" TEXT NOT NULL, 
	prompt TEXT NOT NULL, 
	split TEXT, 
	family TEXT, 
	level INTEGER, 
	body TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "log_tasks" VALUES('sha256:1','sum','add two numbers',NULL,NULL,NULL,'{"key": "sum", "prompt": "add two numbers"}');
CREATE TABLE log_tool_calls (
	run_id TEXT NOT NULL, 
	turn INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	call_name TEXT, 
	arguments TEXT, 
	tool TEXT, 
	ok BOOLEAN, 
	text TEXT, 
	exit_code INTEGER, 
	signal INTEGER, 
	timed_out BOOLEAN, 
	bytes_total BIGINT, 
	truncated BOOLEAN, 
	blob TEXT, 
	files_changed TEXT, 
	denied_network INTEGER, 
	denied_secrets INTEGER, 
	denied_writes_outside INTEGER, 
	started DOUBLE, 
	ended DOUBLE, 
	PRIMARY KEY (run_id, turn, position), 
	FOREIGN KEY(run_id, turn) REFERENCES log_turns (run_id, turn)
);
INSERT INTO "log_tool_calls" VALUES('run1',0,0,'shell','{"command": "ls"}','shell',1,'a.py',0,NULL,0,0,0,NULL,'[]',0,0,0,2.0,3.0);
CREATE TABLE log_turns (
	run_id TEXT NOT NULL, 
	turn INTEGER NOT NULL, 
	policy_id TEXT NOT NULL, 
	policy_version INTEGER NOT NULL, 
	finish TEXT NOT NULL, 
	context_tokens INTEGER, 
	sampled_tokens INTEGER, 
	token_row INTEGER, 
	context_ids BLOB, 
	sampled_ids BLOB, 
	logprobs BLOB, 
	sampling TEXT NOT NULL, 
	text TEXT NOT NULL, 
	thought TEXT NOT NULL, 
	parse_error TEXT, 
	parser TEXT NOT NULL, 
	repairs TEXT NOT NULL, 
	snapshot TEXT, 
	started DOUBLE NOT NULL, 
	ended DOUBLE NOT NULL, 
	PRIMARY KEY (run_id, turn), 
	FOREIGN KEY(run_id) REFERENCES log_runs (id)
);
INSERT INTO "log_turns" VALUES('run1',0,'weights',0,'stop',3,2,0,X'010000000200000003000000',X'0400000005000000',X'9A9999999999B9BF555555555555D5BF','{}','step 0','',NULL,'compact','[]',NULL,1.0,3.5);
CREATE TABLE log_verdicts (
	id INTEGER NOT NULL, 
	run_id TEXT NOT NULL, 
	created DOUBLE NOT NULL, 
	reward DOUBLE, 
	components TEXT NOT NULL, 
	turn_rewards TEXT, 
	checks TEXT NOT NULL, 
	tampering TEXT NOT NULL, 
	failure_kind TEXT, 
	trust TEXT NOT NULL, 
	grader TEXT NOT NULL, 
	graded_hash TEXT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES log_runs (id)
);
CREATE TABLE log_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT log_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "log_version" VALUES('0001');
CREATE INDEX log_tasks_key ON log_tasks ("key");
CREATE INDEX log_runs_started ON log_runs (started, id);
CREATE INDEX log_runs_task ON log_runs (task_id);
CREATE INDEX log_runs_parent ON log_runs (parent);
CREATE INDEX log_verdicts_run ON log_verdicts (run_id, id);
CREATE INDEX log_feedback_run ON log_feedback (run_id);
COMMIT;
