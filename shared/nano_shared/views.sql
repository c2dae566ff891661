-- The documented views of the log: a comment is what the column means; times are unix seconds.
-- They are dropped before a migration and created again after it.

-- One row for each execution.
CREATE VIEW runs AS SELECT
  r.id,  -- run id, sorts by time
  k.key AS task_key,  -- durable name of the task
  r.task_id,  -- content hash of the task
  k.prompt,  -- what was asked
  k.split,  -- train, test or NULL
  k.level,  -- difficulty, from 0
  k.family,  -- program family, splits never share one
  r.policy,  -- the policy as the user named it
  (SELECT t.policy_id FROM log_turns t WHERE t.run_id = r.id AND t.turn = (SELECT max(n.turn) FROM log_turns n WHERE n.run_id = r.id)) AS policy_id,  -- weights that sampled the last turn, NULL before the first
  r.stop,  -- why it ended, NULL while it runs or after it was killed
  r.stop_detail,  -- the stop reason in words
  v.reward,  -- of the newest verdict, NULL where there is none, or where it does not count
  v.trust,  -- of the newest verdict: hidden, user_check, judge or none
  v.grader,  -- of the newest verdict: name and version
  v.failure_kind,  -- of the newest verdict
  (SELECT count(*) FROM log_turns t WHERE t.run_id = r.id) AS turns,  -- finished turns
  (SELECT coalesce(sum(t.context_tokens), 0) FROM log_turns t WHERE t.run_id = r.id) AS context_tokens,  -- tokens read, mask 0
  (SELECT coalesce(sum(t.sampled_tokens), 0) FROM log_turns t WHERE t.run_id = r.id AND t.turn >= coalesce(r.parent_step, 0)) AS sampled_tokens,  -- tokens sampled, mask 1, a fork's own
  CASE WHEN EXISTS (SELECT 1 FROM log_turns t WHERE t.run_id = r.id) AND NOT EXISTS (SELECT 1 FROM log_turns t WHERE t.run_id = r.id AND t.token_row IS NULL) THEN 1 ELSE 0 END AS trainable,  -- 1 where each turn holds its token ids and log-probs, 0 marks a text-only run
  r.answer,  -- given to submit
  r.diff,  -- unified diff of the workspace
  r.started,  -- unix seconds
  r.ended,  -- unix seconds, NULL while it runs
  r.ended - r.started AS seconds,  -- wall clock
  r.parent,  -- run this one was forked from
  r.parent_step,  -- turns taken over from the parent, they are the first of the run
  r.seed,  -- of the run
  r.snapshot,  -- workspace before the first action, a blob id
  r.directory,  -- what the workspace is a copy of, NULL for a task with its own files
  r.owner,  -- whose run it is, NULL in runs of older versions
  r.project,  -- git: and the first commit of the directory's history, else a path, NULL without a directory
  r.share,  -- never, team or train: what others may do with it
  r.profile,  -- interface profile
  r.profile_hash,  -- its content hash
  r.template_hash,  -- of the chat template
  r.tools_hash,  -- of the tools' schemas
  r.runtime_version  -- of nano
FROM log_runs r JOIN log_tasks k ON k.id = r.task_id LEFT JOIN log_verdicts v ON v.id = (SELECT max(n.id) FROM log_verdicts n WHERE n.run_id = r.id);

-- One row for each call of the policy and what followed.
CREATE VIEW turns AS SELECT
  t.run_id,  -- run
  t.turn,  -- from 0
  t.policy_id,  -- weights that sampled
  t.policy_version,  -- optimizer steps behind the weights
  t.text,  -- raw completion as sampled
  t.thought,  -- text beside the calls
  t.finish,  -- stop or length
  t.parse_error,  -- what was wrong where no call could be read
  t.parser,  -- dialect that read the completion
  t.repairs,  -- liberties the parser and the tools took, a JSON list
  (SELECT count(*) FROM log_tool_calls c WHERE c.run_id = t.run_id AND c.turn = t.turn) AS tool_calls,  -- calls and observations of the turn
  t.context_tokens,  -- tokens appended before sampling, NULL on a text-only turn
  t.sampled_tokens,  -- tokens sampled, NULL on a text-only turn
  t.token_row,  -- grows where history was rewritten
  t.context_ids,  -- blob of little-endian uint32
  t.sampled_ids,  -- blob of little-endian uint32
  t.logprobs,  -- blob of little-endian float64, one for each sampled id
  t.sampling,  -- sampling parameters, JSON
  t.snapshot,  -- workspace after the turn, a blob id
  t.started,  -- unix seconds
  t.ended,  -- unix seconds
  t.ended - t.started AS seconds,  -- wall clock
  t.delegated_by,  -- of a sub-agent: the turn that delegated to it, else NULL
  t.api  -- calls, reasoning, usage and cost as an API returned them, JSON, else NULL
FROM log_turns t;

-- One row for each request of a client of `nano-coder serve`.
CREATE VIEW requests AS SELECT
  q.run_id,  -- run
  q.turn,  -- the turn that answers it, from 0
  q.session,  -- name of its session, empty where it named none
  q.client,  -- user agent
  q.conversation,  -- hash of all messages up to the answer
  q.owner  -- hash of the client's key, to whom the session belongs, empty without one
FROM log_requests q;

-- One row for each action and what really happened.
CREATE VIEW tool_calls AS SELECT
  c.run_id,  -- run
  c.turn,  -- turn, from 0
  c.position,  -- within the turn, from 0
  coalesce(c.call_name, c.tool) AS tool,  -- tool that was called
  c.arguments,  -- JSON object, NULL where an observation answers no call
  c.ok,  -- whether it succeeded, NULL where the call was never executed
  c.text AS observation,  -- exactly as shown to the model
  c.exit_code,  -- NULL where no program ran, or a signal ended it
  c.signal,  -- that ended it
  c.timed_out,  -- whether it ran past its limit
  c.bytes_total,  -- size of the full output
  c.truncated,  -- whether the model saw less than that
  c.blob,  -- the full output where it was truncated
  c.files_changed,  -- JSON list of paths
  c.images,  -- JSON list of what the model was shown: blob, media_type, width, height; NULL for none
  c.denied_network,  -- network accesses the sandbox refused
  c.denied_secrets,  -- reads of secrets it refused
  c.denied_writes_outside,  -- writes outside the workspace it refused
  c.started,  -- unix seconds
  c.ended,  -- unix seconds
  c.ended - c.started AS seconds  -- wall clock
FROM log_tool_calls c;

-- One row for each judgement; several graders and versions stand side by side.
CREATE VIEW verdicts AS SELECT
  v.id,  -- the largest of a run is its newest
  v.run_id,  -- run
  v.reward,  -- NULL: a failure that the policy could not cause
  v.components,  -- JSON object of name and score
  v.turn_rewards,  -- JSON list, one for each turn, or NULL
  v.checks,  -- JSON object of name and pass, fail, error or timeout
  v.tampering,  -- JSON list of findings
  v.failure_kind,  -- what went wrong, by name
  v.trust,  -- hidden, user_check, judge or none
  v.grader,  -- name and version
  v.graded_hash,  -- content hash of what was graded
  v.check_run,  -- JSON of a check by command: exit code, end of its output, or NULL
  v.created  -- unix seconds
FROM log_verdicts v;

-- One row for each thing said about a run, a turn or a span.
CREATE VIEW feedback AS SELECT
  f.id,  -- in order of arrival
  f.run_id,  -- run
  f.turn,  -- NULL speaks of the whole run
  f.span_start,  -- first character within the turn's text
  f.span_end,  -- one past the last
  f.kind,  -- accept, reject, edit, thumb, note or outcome
  f.value,  -- +1 or -1 for thumbs, or a score
  f.text,  -- note, edited text, or outcome in words
  f.author,  -- who said it
  f.created  -- unix seconds
FROM log_feedback f;
