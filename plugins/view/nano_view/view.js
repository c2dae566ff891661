// The viewer. Every text reaches the page through text nodes and attributes, made visible first: a run is what a
// stranger wrote. Views are functions of the part of the address behind #; answers come from /api, or from the page.
"use strict";

// ------------------------------------------------------------------------------------------------------- elements

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]/gu;
const CHUNK = 20000; // characters of one block of a long text: the browser lays out those in sight alone
const SVG = "http://www.w3.org/2000/svg";

function escaped(char) {
  if (char === "\n" || char === "\t") return char;
  return [...Array(char.length).keys()]
    .map((n) => "\\u" + char.charCodeAt(n).toString(16).padStart(4, "0"))
    .join("");
}

// control, bidirectional, invisible and unassigned characters, spelled out
const visible = (text) => String(text).replace(HIDDEN, escaped);

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, visible(value));
  }
  const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...shown.map((child) => (child instanceof Node ? child : document.createTextNode(visible(child)))));
  return element;
}

const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
const number = (value, digits = 4) => (value === null || value === undefined ? "-" : String(+Number(value).toPrecision(digits)));
const seconds = (value) => `${Number(value).toFixed(2)} s`;
const when = (time) => (Math.abs(time) > 8.64e12 ? "no date" : new Date(time * 1000).toISOString().slice(0, 16).replace("T", " "));
const link = (view, query, ...children) => h("a", { href: address(view, query) }, ...children);
const address = (view, query) => `#/${view}?${new URLSearchParams(query)}`;
const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
  .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
// the name of a model, or of a folder by its last part; the whole, or a hash, is told by a tooltip
const named = (name) => {
  const short = String(name ?? "-").replace(/\/+$/, "").replace(/^(?:\/|~|\.{1,2}\/).*\//, "").replace(/[0-9a-f]{12,}/g, (hash) => hash.slice(0, 8));
  return short === name ? name : h("span", { title: name }, short);
};
// a task: the first words of its prompt where its key is a hash, which a tooltip tells
const taskName = (key, prompt) => prompt && /[0-9a-f]{16}/.test(key) ? h("span", { title: key }, prompt.split("\n")[0].slice(0, 120)) : key;
const many = (value) => value === null || value === undefined ? "-" : Number(value).toLocaleString("en", { notation: value < 1e4 ? "standard" : "compact", maximumFractionDigits: 1 });
const money = (value) => value === null || value === undefined ? "-" : `$${Number(value).toFixed(value && value < 0.1 ? 4 : 2)}`;
const lasting = (value) => value === null || value === undefined ? "-" : value < 120 ? `${number(value, 3)} s` : value < 7200 ? `${number(value / 60, 3)} min` : `${number(value / 3600, 3)} h`;
const folded = (title, ...children) => h("details", {}, h("summary", {}, title), ...children);

// -------------------------------------------------------------------------------------------------------- answers

const page = document.getElementById("data") && JSON.parse(document.getElementById("data").textContent);

async function ask(name, query) {
  if (page) {
    const key = [name, ...Object.keys(query).sort().map((field) => `${field}=${query[field]}`)].join(" ");
    if (key in page.answers) return page.answers[key];
    throw new Error("this file does not hold that; `nano-coder view` shows the whole log");
  }
  const response = await fetch(`api/${name}?${new URLSearchParams(query)}`);
  const text = await response.text();
  if (!response.headers.get("content-type").includes("json")) throw new Error(text);
  const answer = JSON.parse(text);
  if (answer.error) throw new Error(answer.error);
  return answer;
}

// ----------------------------------------------------------------------------------------------------- long texts

function blocks(text) {
  if (text.length <= 2 * CHUNK) return [h("bdi", {}, text)];
  const found = [];
  for (let at = 0; at < text.length; ) {
    const line = text.lastIndexOf("\n", at + CHUNK);
    let end = line > at ? line + 1 : at + CHUNK;
    if (/[\ud800-\udbff]/.test(text.charAt(end - 1))) end += 1; // both halves of a character
    found.push(h("div", { class: "chunk" }, text.slice(at, end)));
    at = end;
  }
  return found;
}

function diffLines(text) {
  if (text.length > 2 * CHUNK) return blocks(text);
  const kinds = { "+": "added", "-": "removed", "@": "hunk" };
  return text.split("\n").map((line) => h("span", { class: kinds[line[0]] }, line + "\n"));
}

// a text, or its beginning and a button for the rest
function long(run, value, { shape = blocks, label = "text", lines = Infinity } = {}) {
  const cut = typeof value !== "string", text = cut ? value.text : value, all = text.split("\n");
  const first = lines < Infinity ? all.slice(0, lines).join("\n").slice(0, 200 * lines) : text;
  const box = h("pre", { tabindex: 0, role: "group", "aria-label": label }, shape(first));
  if (!cut && first === text) return box;
  const count = cut || all.length <= lines ? `${value.length.toLocaleString("en")} characters` : `${all.length} lines`;
  const more = h("button", { type: "button", onclick: load }, `show all ${count}`);
  async function load() {
    more.disabled = true;
    try {
      const parts = cut ? [] : [text];
      for (let from = cut ? 0 : null; from !== null; ) {
        const part = await ask("text", { id: run, part: value.part, ...(from ? { from } : {}) });
        parts.push(part.text);
        from = part.next;
      }
      box.replaceChildren(...shape(parts.join("")));
      more.remove();
      box.focus();
    } catch (problem) {
      more.replaceWith(h("p", { class: "bad" }, problem.message));
    }
  }
  return h("div", {}, box, more);
}

const later = (run, part, title, options) => {
  const box = folded(title);
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) box.append(long(run, { text: "", length: 0, part }, options));
    box.querySelector("button")?.click();
  }, { once: true });
  return box;
};

// ---------------------------------------------------------------------------------------------------------- lists

// A table of rows that are loaded as they come into sight; only those near the window are in the document.
function listing({ columns, load, href, empty }) {
  const body = h("tbody");
  const table = h("table", { class: "list" }, h("thead", {}, h("tr", {}, columns.map((c) => h("th", { scope: "col", class: c.class }, c.label)))), body);
  const box = h("div", { class: "rows" }, table);
  const rows = [];
  let next = null, busy = false, tall = 36, told = "";

  function draw() {
    if (!box.isConnected) return;
    const above = table.getBoundingClientRect().top;
    const first = Math.max(0, Math.min(rows.length, Math.floor(-above / tall) - 20));
    const last = Math.min(rows.length, first + Math.ceil(innerHeight / tall) + 60);
    const held = document.activeElement?.closest("tr")?.dataset.id;
    const gap = () => h("tr", { class: "gap", "aria-hidden": "true" }, h("td"));
    const top = gap(), bottom = gap();
    top.firstChild.style.height = `${first * tall}px`;
    bottom.firstChild.style.height = `${(rows.length - last) * tall}px`;
    body.replaceChildren(top, ...rows.slice(first, last).map((row, n) => line(row, first + n)), bottom);
    table.setAttribute("aria-rowcount", next ? -1 : rows.length + 1);
    tall = body.children[1]?.classList.contains("row") ? body.children[1].getBoundingClientRect().height || tall : tall;
    if (held !== undefined) body.querySelector(`tr[data-id="${CSS.escape(held)}"] a`)?.focus({ preventScroll: true });
    if (last >= rows.length - 10 && next) more();
  }
  const line = (row, place) => h("tr", { class: "row", "data-id": place, "aria-rowindex": place + 2 }, columns.map((c, n) =>
    h(n ? "td" : "th", { class: c.class, scope: n ? null : "row" }, n ? c.cell(row) : h("a", { href: href(row) }, c.cell(row)))));

  async function more() {
    if (busy) return;
    busy = true;
    try {
      const answer = await load(next);
      rows.push(...answer.rows);
      next = answer.next;
    } finally {
      busy = false;
    }
    if (!rows.length && !next) box.replaceChildren(h("p", { class: "muted" }, empty));
    else requestAnimationFrame(draw);
  }
  // the first page again: new rows come on top, known ones are put in place of what they were
  async function refresh() {
    const answer = await load(null), text = JSON.stringify(answer.rows);
    if (text === told || busy) return;
    told = text;
    const known = new Map(rows.map((row, n) => [row.id || row.of, n]));
    for (const row of answer.rows) if (known.has(row.id || row.of)) rows[known.get(row.id || row.of)] = row;
    rows.unshift(...answer.rows.filter((row) => !known.has(row.id || row.of)));
    if (!rows.length) return;  // what says so stays
    if (!table.isConnected) box.replaceChildren(table);
    draw();
  }
  function step(by) {
    const now = document.activeElement?.closest("tr.row")?.dataset.id;
    const to = Math.max(0, Math.min(rows.length - 1, now === undefined ? 0 : Number(now) + by));
    const place = () => body.querySelector(`tr[data-id="${to}"] a`);
    if (!place()) {
      scrollTo(0, scrollY + table.getBoundingClientRect().top + to * tall - innerHeight / 2);
      draw();
    }
    place()?.focus();
  }
  const onscroll = () => requestAnimationFrame(() => table.isConnected && draw());
  addEventListener("scroll", onscroll, { passive: true, signal: leaving.signal });
  return { box, ready: more(), refresh, step };
}

const reward = (value) => value === null ? h("span", { class: "muted" }, "none") : h("span", { class: value >= 1 ? "good" : value <= 0 ? "bad" : "" }, number(value));
const usage = (of) => `${many(of.read ?? of.prompt)} tokens in${of.cached ? `, ${many(of.cached)} of them cached` : ""}, ${many(of.written ?? of.completion)} out${of.cost === null || of.cost === undefined ? "" : `, ${money(of.cost)}`}`;
const ended = (run) => run.stop || "unfinished";
const RUN_COLUMNS = (codes) => [
  { label: "Run", class: "medium", cell: (run) => run.id },
  { label: "Asked", cell: (run) => h("span", { title: run.task_key }, `${run.parent ? "⑂ " : ""}${run.prompt}`) },
  { label: "Policy", class: "medium spare", cell: (run) => named(run.policy) },
  { label: "Started, UTC", class: "medium spare", cell: (run) => when(run.started) },
  { label: "Turns", class: "narrow extra", cell: (run) => run.turns },
  { label: "Took", class: "narrow extra", cell: (run) => lasting(run.ended === null ? null : run.ended - run.started) },
  { label: "Tokens", class: "narrow extra", cell: (run) => h("span", { title: usage(run) }, many(run.read === null ? null : run.read + run.written)) },
  { label: "Cost", class: "narrow extra", cell: (run) => money(run.cost) },
  { label: "Stop", class: "narrow spare", cell: ended },
  { label: "Reward", class: "narrow", cell: (run) => reward(run.reward) },
  { label: "May train", class: "medium", cell: (run) => run.refused.length
    ? h("span", { class: "bad", title: run.refused.map((code) => `${code}: ${codes[code]}`).join("\n") }, run.refused.join(", "))
    : h("span", { class: "good" }, "yes") },
];

function runListing(name, query, empty) {
  const codes = {};
  return listing({
    columns: RUN_COLUMNS(codes), href: (run) => address("run", { id: run.id }), empty,
    load: async (after) => {
      const answer = await ask(name, { ...(page && name === "runs" ? {} : query), ...(after ? { after: JSON.stringify(after) } : {}) });
      Object.assign(codes, answer.codes);
      return page && name === "runs" ? { ...answer, rows: sorted(answer.rows.filter((run) => matches(run, query)), query.sort) } : answer;
    },
  });
}

const FALLING = { oldest: (r) => -r.started, best: (r) => r.reward, worst: (r) => r.reward === null ? null : -r.reward, costliest: (r) => r.cost,
  longest: (r) => r.ended === null ? null : r.ended - r.started, "most tokens": (r) => r.read === null ? null : r.read + r.written };
const sorted = (rows, by) => !FALLING[by] ? rows : rows.filter((r) => FALLING[by](r) !== null).sort((a, b) => FALLING[by](b) - FALLING[by](a));
const monday = (time) => Math.floor((time / 86400 + 3) / 7);

// the filters of the list, in a file that nobody can ask
function matches(run, query) {
  const has = (text, part) => !part || String(text || "").includes(part);
  const ranges = { full: (r) => r >= 1, zero: (r) => r !== null && r <= 0, none: (r) => r === null, partial: (r) => r > 0 && r < 1 };
  return has(run.policy, query.policy) && has(run.task_key, query.task) && has(run.prompt, query.text)
    && has(run.directory, query.project) && (!query.week || monday(run.started) === monday(Date.parse(query.week) / 1000))
    && (!query.stop || ended(run) === query.stop) && (!query.reward || ranges[query.reward](run.reward))
    && (!query.may || (query.may === "train" ? !run.refused.length : run.refused.includes(query.may)));
}

// ---------------------------------------------------------------------------------------------------------- views

const FILTERS = [["text", "Text"], ["policy", "Policy"], ["task", "Task"], ["stop", "Stop"], ["reward", "Reward"], ["may", "May train"],
  ["project", "Project"], ["week", "Week of"], ["sort", "Order"], ["by", "Add up by"]];
const ANY = { sort: null, by: "nothing" }; // what is chosen where nothing is

async function runs(main, query) {
  const { choices } = page ? page.answers.runs : await ask("runs", query);
  const place = h("div"), sums = h("div");
  let live = null;
  const show = () => {
    live = runListing("runs", chosen(), "No run matches.");
    place.replaceChildren(live.box);
    return Promise.all([live.ready, page ? null : added(sums, chosen())]);
  };
  const field = ([name, label]) => {
    const options = choices[name] && (Array.isArray(choices[name]) ? choices[name].map((c) => [c, c]) : Object.entries(choices[name]));
    const input = options
      ? h("select", { name }, ANY[name] === null ? null : h("option", { value: "" }, ANY[name] || "any"), options.map(([value, text]) => h("option", { value }, text)))
      : h("input", { name, type: name === "week" ? "date" : "search", spellcheck: "false" });
    if (query[name] || input.type !== "select-one" || ANY[name] !== null) input.value = query[name] || "";
    return h("label", {}, label, input);
  };
  const form = h("form", { role: "search", "aria-label": "Filters" }, FILTERS.filter(([name]) => !page || name !== "by").map(field));
  const chosen = () => Object.fromEntries([...new FormData(form)].filter(([name, value]) => value && (name !== "sort" || value !== "newest")));
  let waiting = 0;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      history.replaceState(null, "", address("runs", chosen()));
      show().catch(fail);
    }, 250);
  });
  main.append(heading("Runs"), form, sums, place);
  await show();
  return { refresh: () => Promise.all([chosen().sort ? null : live.refresh(), page ? null : added(sums, chosen())]), step: (by) => live.step(by) };
}

// sums over the runs that the filters choose: one line of all, or a table by model, project or week
async function added(place, query) {
  const { rows } = await ask("sums", query), key = { model: "policy" }[query.by] || query.by, text = JSON.stringify([query, rows]);
  if (place.told === text) return;
  place.told = text;
  const share = (r) => r.graded ? `${number(100 * r.solved / r.graded, 3)} % of ${many(r.graded)}` : "-";
  const note = query.text || query.may ? "without regard to Text and May train: " : "";
  if (!query.by) return void place.replaceChildren(...rows.filter((r) => r.runs).map((r) => h("p", { class: "muted small" }, `${note}${many(r.runs)} runs, solved ${share(r)}, ${usage(r)}, ${lasting(r.seconds)}`)));
  const name = (r) => r.key === null ? "none" : link("runs", { ...query, by: "", [key]: r.key }, query.by === "project" ? named(r.directory || r.key) : named(r.key));
  place.replaceChildren(query.by === "week" ? weekly(rows.filter((r) => r.key)) : "", table({ caption: `${note}By ${query.by}`, numeric: true, head: [query.by, "runs", "solved", "cost", "tokens in", "cached", "out", "time"],
    rows: rows.map((r) => [name(r), many(r.runs), share(r), money(r.cost), many(r.read), many(r.cached), many(r.written), lasting(r.seconds)]) }));
}

// what became of the runs of each week, of ten years at most; one without any is empty
function weekly(rows) {
  if (rows.length < 2) return "";
  const week = (r) => Math.floor(Date.parse(r.key) / 604.8e6), last = Math.max(...rows.map(week)), first = Math.max(last - 520, Math.min(...rows.map(week)));
  const of = new Map(rows.map((r) => [week(r) - last, r])), steps = Array.from({ length: last - first + 1 }, (_, n) => n + first - last);
  const curve = (name, count) => { const values = steps.map((n) => (of.has(n) ? count(of.get(n)) : 0)); return { name, steps, values, line: values, low: values, high: values, band: "" }; };
  return h("div", { class: "plots" }, chart({ title: "Runs with a verdict", across: "weeks from the newest", stack: true, span: 1, curves: [
    curve("solved here", (r) => r.solved - r.solved_hosted), curve("solved by a hosted model", (r) => r.solved_hosted), curve("failed", (r) => r.graded - r.solved)] }));
}

async function groups(main) {
  const list = listing({
    empty: "No run is logged yet.", href: (group) => address("group", { id: group.of }),
    load: (after) => ask("groups", after ? { after: JSON.stringify(after) } : {}),
    columns: [
      { label: "Task", cell: (g) => [taskName(g.task, g.prompt), (g.parent ? ` ⑂ ${g.parent} after turn ${g.parent_step}` : "")] },
      { label: "Runs", class: "narrow", cell: (g) => g.runs },
      { label: "Graded", class: "narrow spare", cell: (g) => g.graded },
      { label: "Worst", class: "narrow", cell: (g) => reward(g.least) },
      { label: "Mean", class: "narrow", cell: (g) => reward(g.mean) },
      { label: "Best", class: "narrow", cell: (g) => reward(g.best) },
      { label: "Newest, UTC", class: "medium spare", cell: (g) => when(g.newest) },
    ],
  });
  main.append(heading("Groups"), h("p", { class: "muted" }, "Runs of one task, and forks of one step: what an advantage compares."), list.box);
  await list.ready;
  return list;
}

const bestAndWorst = (group) => group.best && group.best !== group.worst ? address("pair", { left: group.best, right: group.worst }) : null;

async function group(main, query) {
  const answer = await ask("group", { id: query.id });
  const found = answer.group, pair = bestAndWorst(answer);
  main.append(heading(taskName(found.task, found.prompt)), facts([
    ["forks of", found.parent && link("run", { id: found.parent }, found.parent)], ["after turn", found.parent_step],
    ["runs", found.runs], ["graded", found.graded], ["mean reward", number(found.mean)], ["worst", number(found.least)], ["best", number(found.best)],
  ]), h("p", {}, pair ? h("a", { href: pair }, "Best and worst side by side") : "No run of it was better or worse than another."));
  const list = runListing("group", { id: query.id }, "No run.");
  main.append(list.box);
  await list.ready;
  return { ...list, keys: pair ? { c: () => (location.hash = pair) } : {} };
}

// ---------------------------------------------------------------------------------------------------------- a run

const LENSES = {
  logprob: ["log-prob", "nats", (v) => "s" + [0.9, 0.5, 0.2, 0.05].filter((bound) => Math.exp(v) < bound).length],
  advantage: ["advantage", "reward minus the mean of its group", (v, most) => signed(v, most)],
  entropy: ["entropy", "nats", (v) => "s" + [0.1, 0.5, 1, 2].filter((bound) => v > bound).length],
  ratio: ["importance ratio", "scoring policy over sampler", (v) => signed(Math.log(v), 0.3)],
  mismatch: ["mismatch", "nats, sampler minus scoring policy", (v) => signed(v, 0.1)],
  age: ["version age", "updates behind the newest logged version", (v) => "s" + Math.min(4, v)],
};
const signed = (value, most) => (value > 0 ? "p" : "n") + Math.min(3, Math.ceil((3 * Math.abs(value)) / (most || 1)));
const column = (values, n) => (Array.isArray(values) ? values[n] : values);
let lens = "logprob";

function paint(box) {
  const { texts, counts, columns } = box.tokens, values = columns[lens];
  const most = values === undefined ? 1 : Math.max(...[values].flat().map(Math.abs), 1e-9);
  let at = 0;
  [...box.children].forEach((span, n) => {
    const own = Array.from({ length: counts[n] }, (_, k) => column(values, at + k));
    // of several tokens that make one character, the one that stands out
    const far = lens === "logprob" ? Math.min(...own) : own.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a));
    const shade = box.closest(".masked") || values === undefined || far === 0 && lens === "advantage" ? "" : LENSES[lens][2](far, most);
    span.className = [shade, span.classList.contains("differs") ? "differs" : ""].join(" ").trim();
    at += counts[n];
  });
}

function told(box, place) {
  const { texts, counts, columns, spelled } = box.tokens;
  const before = counts.slice(0, place).reduce((a, b) => a + b, 0);
  const said = Object.entries(columns).map(([name, values]) => {
    const own = Array.from({ length: Array.isArray(values) ? counts[place] : 1 }, (_, k) => column(values, before + k));
    const share = name === "logprob" ? ` (${own.map((v) => (100 * Math.exp(v)).toFixed(1) + " %").join(", ")})` : "";
    return `${LENSES[name][0]} ${own.map((v) => number(v)).join(", ")}${share}`;
  });
  return `token ${before + 1} ${JSON.stringify(texts[place])}: ${said.join("; ")}`;
}

// the sampled tokens of a turn; the pointer and the arrow keys tell the values of one
function tokens(found, differs) {
  let at = 0;
  const box = h("pre", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Sampled tokens; arrow keys tell their values" }, found.texts.map((text, n) => {
    const here = differs >= at && differs < at + found.counts[n];
    at += found.counts[n];
    return h("span", { class: here ? "differs" : null }, text);
  }));
  box.tokens = found;
  let place = -1;
  const tell = (n) => {
    box.children[place]?.classList.remove("at");
    place = Math.max(0, Math.min(box.children.length - 1, n));
    box.children[place]?.classList.add("at");
    status(told(box, place));
  };
  box.addEventListener("pointerover", (event) => event.target !== box && tell([...box.children].indexOf(event.target)));
  box.addEventListener("pointerleave", () => status(""));
  box.addEventListener("blur", () => status(""));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !box.children.length) return;
    event.preventDefault();
    tell(place + by);
    box.children[place].scrollIntoView({ block: "nearest" });
  });
  return box;
}

// what a model was shown, as data of the answer; a large one by its size alone
const pictures = (images) => (images || []).map(({ about, data }) => data
  ? h("img", { class: "shown", src: data, alt: `Image: ${about}`, title: about })
  : h("p", { class: "muted small" }, `an image (${about}), too large for this page or not in the log's blobs`));

function observation(run, seen) {
  const ends = [
    seen.exit_code !== null && `exit code ${seen.exit_code}`, seen.signal !== null && `signal ${seen.signal}`,
    seen.timed_out && "timed out", seen.truncated && `shortened from ${seen.bytes_total.toLocaleString("en")} bytes`,
    seen.files_changed.length && `changed ${seen.files_changed.join(", ")}`,
    ...Object.entries(seen.denials).map(([kind, count]) => `${count} denied: ${kind}`), seconds(seen.seconds),
  ].filter(Boolean);
  return h("div", { class: "seen" }, h("p", { class: "small" },
    h("span", { class: seen.ok ? "good" : "bad" }, `${seen.tool} ${seen.ok ? "answered" : "failed"}`), h("span", { class: "muted" }, `, ${ends.join(", ")}`)),
  long(run, seen.text, { label: `Output of ${seen.tool}`, lines: 8 }), pictures(seen.images), seen.whole && later(run, seen.whole, "The whole output"));
}

function turn(run, found, differs = null) {
  const box = h("section", { class: `turn${found.inherited ? " inherited masked" : ""}`, tabindex: -1, "aria-label": `Turn ${found.index + 1} of ${run}` });
  const draw = (found) => {
    const drawn = found.tokens;
    const sampled = drawn && drawn.texts.length ? tokens(drawn, differs === null ? -1 : differs) : null;
    box.replaceChildren(...[
      h("h3", {}, `Turn ${found.index + 1} `, h("span", { class: "muted small" }, [
        found.inherited && "of its parent", seconds(found.seconds), found.usage && usage(found.usage), drawn && `${drawn.read} tokens read, ${drawn.sampled} sampled`, drawn && drawn.row > 0 && `row ${drawn.row}`,
        found.finish !== "stop" && `ended by ${found.finish}`, found.repairs.length && `repaired: ${found.repairs.join(", ")}`,
      ].filter(Boolean).join(", "), " by ", h("span", { title: found.policy_id }, named(found.policy), found.version ? ` version ${found.version}` : ""))),
      found.messages.map((m, n) => folded(`${m.role} said`, long(run, m.content), pictures(m.images))),
      drawn && drawn.context && h("details", { class: "masked" }, h("summary", {}, `${drawn.read} tokens read, masked`), h("pre", { tabindex: 0, role: "group", "aria-label": "Tokens read" }, drawn.context)),
      (!sampled || !drawn.spelled) && long(run, found.text, { label: "Completion" }),
      sampled, drawn && !drawn.spelled && h("p", { class: "muted small" }, "No tokenizer at hand spells this text: tokens are shown by their ids."),
      drawn && drawn.more > 0 && h("button", { type: "button", onclick: whole }, `show ${drawn.more} more tokens`),
      found.parse_error && h("p", { class: "bad" }, `no call could be read: ${found.parse_error}`),
      found.calls.map((call, n) => h("details", { open: true }, h("summary", {}, "→ ", h("strong", {}, call.tool), outcome(found.seen[n])),
        long(run, call.arguments, { label: `Arguments of ${call.tool}`, lines: 12 }), found.seen[n] && observation(run, found.seen[n]))),
      found.seen.slice(found.calls.length).map((seen) => observation(run, seen)),
      found.diff && later(run, found.diff, "What this turn changed", { shape: diffLines, label: "Diff" }),
    ].flat().filter((child) => child instanceof Node));
    if (sampled) paint(sampled);
  };
  const whole = async () => draw(await ask("turn", { id: run, turn: found.index }));
  draw(found);
  return box;
}

const outcome = (seen) => seen ? h("span", { class: seen.ok ? "good" : "bad" }, ` ${seen.ok ? "answered" : "failed"}${seen.exit_code !== null ? `, exit ${seen.exit_code}` : ""}`) : h("span", { class: "muted" }, " never executed");

function lensChoice(shown) {
  const known = Object.keys(LENSES).filter((name) => shown.some((found) => found.tokens && name in found.tokens.columns));
  if (!known.length) return h("p", { class: "muted" }, "Text-only: no token of it was logged.");
  if (!known.includes(lens)) lens = known[0];
  const legend = h("span", { class: "legend small" });
  const select = h("select", { onchange: () => { lens = select.value; explain(); document.querySelectorAll(".tokens").forEach(paint); } },
    known.map((name) => h("option", { value: name }, LENSES[name][0])));
  const explain = () => legend.replaceChildren(...LEGENDS[lens].map(([shade, text]) => h("span", { class: shade }, text)), h("span", { class: "masked" }, "grey: masked"), `; ${LENSES[lens][1]}`);
  select.value = lens;
  explain();
  return h("p", {}, h("label", {}, "Colour tokens by ", select), " ", legend);
}
const DIVERGING = [["n3", "far below"], ["n1", "below 0"], ["p1", "above 0"], ["p3", "far above"]];
const LEGENDS = {
  logprob: [["s0", "above 90 %"], ["s1", "above 50 %"], ["s2", "above 20 %"], ["s3", "above 5 %"], ["s4", "less likely"]],
  entropy: [["s0", "under 0.1"], ["s1", "under 0.5"], ["s2", "under 1"], ["s3", "under 2"], ["s4", "more"]],
  age: [["s0", "newest"], ["s1", "1"], ["s2", "2"], ["s3", "3"], ["s4", "4 and more"]],
  advantage: DIVERGING, ratio: DIVERGING, mismatch: DIVERGING,
};

function tree(rows, now) {
  const below = (id) => rows.filter((row) => row.parent === id);
  const drawn = new Set();
  const node = (row) => {
    drawn.add(row.id);
    const forks = below(row.id).filter((fork) => !drawn.has(fork.id));
    return h("li", {}, row.id === now ? h("strong", { "aria-current": "true" }, row.id) : link("run", { id: row.id }, row.id),
      h("span", { class: "muted small" }, ` ${row.parent_step !== null ? `from turn ${row.parent_step}, ` : ""}${row.turns} turns, ${ended(row)}, reward `), reward(row.reward),
      forks.length ? h("ul", {}, forks.map(node)) : null);
  };
  const roots = rows.filter((row) => !rows.some((other) => other.id === row.parent));
  return h("ul", { class: "tree" }, (roots.length ? roots : rows.slice(0, 1)).map(node));
}

function verdict(found) {
  if (!found) return h("p", {}, "None: the run was not graded.");
  return h("div", {}, facts([["reward", reward(found.reward)], ["grader", found.grader], ["trust", found.trust], ["failure", found.failure_kind],
    ...Object.entries(found.components).map(([name, value]) => [name, number(value)])]),
  h("ul", {}, Object.entries(found.checks).slice(0, 500).map(([name, result]) => h("li", { class: result === "pass" ? "good" : "bad" }, `${result}: ${name}`))),
  found.tampering.map((t) => h("p", { class: "bad" }, `tampering, ${t.kind}: ${t.detail}`)),
  found.check_run && found.check_run.output && folded("Output of the check", long("", found.check_run.output)));
}

function runHead(run) {
  return facts([
    ["task", taskName(run.task, run.prompt.text ?? run.prompt)], ["level", run.level], ["family", run.family], ["split", run.split], ["policy", named(run.policy)], ["profile", run.profile],
    ["stopped", run.stop ? run.stop + (run.stop_detail ? `: ${run.stop_detail}` : "") : "not yet"], ["reward", reward(run.reward)], ["seed", run.seed],
    ["started", when(run.started)], ["took", run.ended ? seconds(run.ended - run.started) : null], ["turns", run.turn_count], ["tokens sampled", run.tokens], ["usage", run.usage && usage(run.usage)], ["directory", run.directory],
  ]);
}

async function run(main, query) {
  const found = await ask("run", { id: query.id });
  const id = found.id, drawn = new Map(), place = h("div");
  const head = h("div");
  const pair = found.group.best !== found.group.least ? address("group", { id: found.group.of }) : null;
  const top = (found) => {
    const refused = found.findings.filter((finding) => finding.blocks);
    head.replaceChildren(runHead(found), h("p", {}, link("group", { id: found.group.of }, `its group of ${found.group.runs}`)),
      h("h2", {}, refused.length ? "Why it may not train" : "It may train a policy gradient"),
      h("ul", {}, found.findings.map((finding) => h("li", { class: finding.blocks ? "bad" : "muted" }, h("strong", {}, finding.kind), `: ${finding.text}`))),
      ...(found.tree.length > 1 ? [h("h2", {}, "Forks"), tree(found.tree, id)] : []));
  };
  const end = h("div");
  const tail = (found) => end.replaceChildren(
    ...(found.answer !== null ? [h("h2", {}, "Answer"), long(id, found.answer)] : []),
    ...(found.diff ? [h("h2", {}, "What it changed"), long(id, found.diff, { shape: diffLines, label: "Diff" })] : []),
    h("h2", {}, "Verdict"), verdict(found.verdict),
    ...(found.feedback.length ? [h("h2", {}, "Feedback"), h("ul", {}, found.feedback.map((f) => h("li", {}, [f.kind, f.value, f.text, f.author].filter((x) => x !== null).join(" "))))] : []));
  const add = (turns) => turns.forEach((each) => {
    const text = JSON.stringify(each), known = drawn.get(each.index);
    if (known?.text === text) return;
    const element = turn(id, each);
    known ? known.element.replaceWith(element) : place.append(element);
    drawn.set(each.index, { text, element });
  });
  const more = h("button", { type: "button", onclick: () => onward().catch(fail) }, "");
  const onward = async () => {
    add((await ask("run", { id, first: drawn.size })).turns);
    count(found.turn_count);
  };
  const count = (all) => { more.textContent = `show turns ${drawn.size + 1} to ${all}`; more.hidden = drawn.size >= all; };
  top(found); tail(found); add(found.turns); count(found.turn_count);
  main.append(heading(`Run ${id}`), head, h("h2", {}, "Asked"), long(id, found.prompt, { label: "Prompt" }), pictures(found.images),
    Object.entries(found.files).map(([name, text]) => folded(name, long(id, text, { label: name }))).reduce((a, b) => (a.append(b), a), h("div")),
    h("h2", {}, "Turns"), lensChoice(found.turns), place, more, end);
  let before = JSON.stringify(found);
  return {
    async refresh() {
      const now = await ask("run", { id }), text = JSON.stringify(now);
      if (text === before) return;
      before = text;
      found.turn_count = now.turn_count;
      top(now); tail(now); add(now.turns); count(now.turn_count);
    },
    step: stepTurns(place),
    keys: { g: () => (location.hash = address("group", { id: found.group.of })), ...(pair ? { c: async () => (location.hash = bestAndWorst(await ask("group", { id: found.group.of }))) } : {}) },
  };
}

const stepTurns = (place) => (by) => {
  const all = [...place.querySelectorAll(".turn")], now = all.indexOf(document.activeElement?.closest(".turn"));
  const to = all[Math.max(0, Math.min(all.length - 1, now < 0 ? 0 : now + by))];
  to?.focus();
  to?.scrollIntoView({ block: "start" });
};

async function pair(main, query) {
  const found = await ask("pair", { left: query.left, right: query.right });
  const { place } = found, what = { read: "in what they read", sampled: "in a sampled token", text: "in the text", observation: "in an observation", end: "where one has ended", nothing: "nowhere" }[place.what];
  const unit = ["text", "observation"].includes(place.what) ? "characters" : "tokens";
  const side = (title, run) => h("section", { "aria-label": title }, h("h2", {}, `${title}: `, link("run", { id: run.id }, run.id)), runHead(run),
    run.turns.map((each) => turn(run.id, each, each.index === place.turn && place.what === "sampled" ? place.at : null)),
    h("h3", {}, "What it changed"), long(run.id, run.diff, { shape: diffLines, label: "Diff" }));
  const columns = h("div", { class: "pair" }, side("Left", found.left), side("Right", found.right));
  main.append(heading("Side by side"), h("p", {}, `They share ${place.shared} ${unit} and first differ ${what}${place.what === "nothing" ? "" : `, in turn ${place.turn + 1}`}. `,
    link("group", { id: found.group }, "their group"), " ", link("pair", { left: query.right, right: query.left }, "swap")),
  lensChoice([...found.left.turns, ...found.right.turns]), columns);
  const differs = columns.querySelector(".differs");
  const go = async (by) => {
    const others = (await ask("group", { id: found.group })).rows.map((row) => row.id).filter((id) => id !== query.left);
    location.hash = address("pair", { left: query.left, right: others[(others.indexOf(query.right) + by + others.length) % others.length] });
  };
  return {
    after: () => (differs || columns).scrollIntoView({ block: "center" }), step: stepTurns(columns),
    keys: { x: () => (location.hash = address("pair", { left: query.right, right: query.left })), "]": () => go(1), "[": () => go(-1), g: () => (location.hash = address("group", { id: found.group })) },
  };
}

// ------------------------------------------------------------------------------------------------------ trainings

async function trainings(main) {
  const { rows } = await ask("trainings", {});
  main.append(heading("Trainings"));
  if (!rows.length) return void main.append(h("p", { class: "muted" }, "None yet: nano-rl train --name NAME makes one."));
  const form = h("form", { "aria-label": "Compare trainings" }, h("button", { type: "submit" }, "Compare the marked ones"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const names = [...main.querySelectorAll("input:checked")].map((box) => box.value);
    if (names.length) location.hash = address("training", { name: names.join(",") });
  });
  const head = ["mark", "training", ...Object.keys(rows[0].cells)];
  main.append(form, table({ caption: "Trainings", head, rows: rows.map((row) => [
    h("input", { type: "checkbox", value: row.name, "aria-label": `mark ${row.name}` }), link("training", { name: row.name }, row.name), ...Object.values(row.cells)]) }));
}

const cell = (value) => value instanceof Node || value === null || typeof value !== "object" ? (value === null ? "-" : value)
  : value.run ? link("run", { id: value.run }, value.text) : h("mark", {}, value.text);

function table({ caption, head, rows, numeric }) {
  const kind = (n) => ({ class: numeric && n ? "number" : null });
  return h("div", { class: "wide", role: "group", tabindex: 0, "aria-label": caption }, h("table", {}, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, head.map((text, n) => h("th", { scope: "col", ...kind(n) }, text)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, n) => h(n ? "td" : "th", { scope: n ? null : "row", ...kind(n) }, cell(head[n] === "model" && typeof value === "string" ? named(value) : value))))))));
}

function section(found) {
  const content = [
    found.note && h("p", { class: "muted" }, found.note), found.alert && h("p", { class: "bad" }, found.alert),
    found.plots && found.plots.length && h("div", { class: `plots${found.minor ? " minor" : ""}` }, found.plots.map(chart)),
    (found.tables || []).map(table),
    found.lines && h("ol", {}, found.lines.map((line) => h("li", { class: line.bad ? "bad" : null }, line.text))),
  ];
  return h("section", { "aria-label": found.title }, h("h2", {}, found.title), found.folded ? folded("Show", ...content) : content);
}

async function training(main, query) {
  let before = null;
  const place = h("div"), figures = () => [...place.querySelectorAll("figure")].filter((figure) => figure.plot.across === "step");
  if (look.name !== query.name) Object.assign(look, WHOLE, { name: query.name, smooth: SMOOTH, across: "step" });
  const smooth = h("input", { type: "range", min: 0, max: 50, value: look.smooth, oninput: () => { look.smooth = Number(smooth.value); look.redraw(); } });
  const along = h("select", { onchange: () => { Object.assign(look, WHOLE, { across: along.value }); look.redraw(); } }, ["step", "time"].map((name) => h("option", { value: name, selected: name === look.across }, name)));
  const whole = h("button", { type: "button", onclick: () => { Object.assign(look, WHOLE); look.redraw(); } }, "Whole range");
  const controls = h("form", { "aria-label": "Curves" }, h("label", {}, "Smoothing", smooth), h("label", {}, "Along", along), whole, h("span", { class: "muted small" }, "drag over a curve, or + on a step, zooms"));
  controls.addEventListener("submit", (event) => event.preventDefault());
  look.redraw = () => {
    const now = figures().findIndex((figure) => figure.contains(document.activeElement));
    figures().forEach((figure) => figure.replaceWith(chart(figure.plot)));
    if (now >= 0) figures()[now].querySelector("svg").focus();
    controls.hidden = !figures().some((figure) => figure.plot.curves.some((curve) => curve.steps.length > 2));
    along.parentElement.hidden = !figures().some((figure) => figure.plot.curves.every((curve) => curve.hours));
    whole.hidden = look.from === null;
  };
  const draw = async () => {
    const found = await ask("training", { name: query.name }), text = JSON.stringify(found);
    if (text === before) return;
    before = text;
    const open = [...place.querySelectorAll("details")].map((box) => box.open);
    place.replaceChildren(h("p", { class: "muted" }, found.about),
      h("dl", { class: "tiles" }, found.tiles.map(([label, value, remark]) => h("div", {}, h("dt", {}, label), h("dd", {}, h("b", {}, value), h("span", { class: "muted small" }, remark))))),
      ...found.sections.map(section));
    place.querySelectorAll("details").forEach((box, n) => (box.open = open[n] || false));
    look.redraw();
  };
  main.append(heading(query.name.split(",").join(" and ")), controls, place);
  await draw();
  return { refresh: draw };
}

// --------------------------------------------------------------------------------------------------------- charts

const WIDE = 520, TALL = 250, BOX = { left: 52, right: 508, top: 12, bottom: 222 };

// how the curves over the steps of a training are looked at: share of a curve that is averaged, axis, and range
const SMOOTH = 5, WHOLE = { from: null, to: null }, look = { ...WHOLE, name: null, smooth: SMOOTH, across: "step", redraw: () => {} };

function viewed(plot) {
  if (plot.across !== "step") return plot;
  const timed = look.across === "time" && plot.curves.every((curve) => curve.hours);
  const curves = plot.curves.map((curve, place) => {
    const steps = timed ? curve.hours : curve.steps, half = Math.round(curve.values.length * look.smooth / 200);
    const inside = (list) => list.filter((_, n) => look.from === null || (steps[n] >= look.from && steps[n] <= look.to));
    const mean = (_, n, all) => { const near = all.slice(Math.max(0, n - half), n + half + 1); return near.reduce((a, b) => a + b) / near.length; };
    const line = look.smooth === SMOOTH ? curve.line : curve.values.map(mean);
    return { ...curve, place, steps: inside(steps), values: inside(curve.values), line: inside(line), low: inside(curve.low), high: inside(curve.high) };
  }).filter((curve) => curve.steps.length);
  return curves.length ? { ...plot, curves, across: timed ? "hours" : "step" } : plot;
}

function zoom(from, to) {
  Object.assign(look, { from, to });
  look.redraw();
}

function ticks(low, high, count) {
  const rough = (high - low) / count, scale = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * scale).find((n) => n >= rough);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

function extent(plot) {
  const all = plot.curves.flatMap((c) => [...c.low, ...c.high]);
  if (plot.share) return [0, 1];
  let low = Math.min(...all), high = Math.max(...all);
  if (plot.stack) [low, high] = [0, Math.max(...plot.curves[0].steps.map((_, n) => plot.curves.reduce((sum, c) => sum + c.values[n], 0)))];
  if (high - low < plot.span) [low, high] = [Math.min(0, low), Math.min(0, low) + plot.span]; // smaller changes are rounding
  if (high - low < 1e-12 * Math.max(Math.abs(high), 1e-280)) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  return [low, high];
}

// curves with bands, or a stack; the pointer and the arrow keys tell the values of a step
function chart(whole) {
  const plot = viewed(whole);
  const steps = [...new Set(plot.curves.flatMap((c) => c.steps))].sort((a, b) => a - b);
  const [first, last] = [steps[0], Math.max(steps[steps.length - 1], steps[0] + 1e-9)];
  const [low, high] = extent(plot);
  const x = (step) => BOX.left + ((step - first) / (last - first)) * (BOX.right - BOX.left);
  const y = (value) => BOX.bottom - ((value - low) / (high - low)) * (BOX.bottom - BOX.top);
  const points = (xs, ys) => xs.map((step, n) => `${x(step).toFixed(1)} ${y(ys[n]).toFixed(1)}`);
  const area = (curve, below, above) => s("path", { class: `k${curve.place % 8}`, fill: "var(--k)", d: `M${points(curve.steps, above).join("L")}L${points(curve.steps, below).reverse().join("L")}Z` });
  const label = plot.share ? (v) => `${+(100 * v).toPrecision(3)} %` : (v) => String(+v.toPrecision(4));
  const svg = s("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", tabindex: 0, "aria-label": `${plot.title} over the ${plot.across}; arrow keys tell the values${whole.across === "step" ? ", + zooms, - shows the whole" : ""}` },
    ticks(low, high, 4).map((v) => [s("path", { d: `M${BOX.left} ${y(v)}H${BOX.right}`, stroke: "var(--grid)" }), s("text", { x: BOX.left - 5, y: y(v) + 3, "text-anchor": "end" }, label(v))]),
    (last - first > 1e-6 ? ticks(first, last, 6) : [first]).map((v) => s("text", { x: x(v), y: BOX.bottom + 14, "text-anchor": "middle" }, +v.toPrecision(6))),
    s("text", { x: (BOX.left + BOX.right) / 2, y: TALL - 2, "text-anchor": "middle" }, plot.across));
  let below = steps.map(() => 0);
  plot.curves.forEach((curve, place) => {
    curve.place ??= place;
    const stroke = { class: `k${curve.place % 8}`, stroke: "var(--k)", fill: "none" };
    if (plot.stack) {
      const above = below.map((v, n) => v + curve.values[n]);
      svg.append(steps.length > 1 ? area(curve, below, above) : s("path", { ...stroke, "stroke-width": 30, d: `M${x(first) + 40} ${y(below[0])}V${y(above[0])}` }));
      below = above;
      return;
    }
    if (curve.band) {
      const band = area(curve, curve.low, curve.high);
      band.setAttribute("fill-opacity", "0.16");
      svg.append(band);
    }
    if (plot.curves.length === 1 && curve.line.some((v, n) => v !== curve.values[n])) svg.append(s("path", { ...stroke, "stroke-width": 0.6, opacity: 0.5, d: `M${points(curve.steps, curve.values).join("L")}` }));
    if (!plot.points) svg.append(s("path", { ...stroke, "stroke-width": 1.7, d: `M${points(curve.steps, curve.line).join("L")}` }));
    if (plot.points || curve.steps.length === 1) curve.steps.forEach((step, n) => svg.append(s("circle", { ...stroke, fill: "var(--k)", cx: x(step), cy: y(curve.line[n]), r: 4 })));
    if (plot.points) curve.steps.forEach((step, n) => svg.append(s("path", { ...stroke, d: `M${x(step)} ${y(curve.low[n])}V${y(curve.high[n])}` })));
  });
  if (plot.diagonal) svg.append(s("path", { d: `M${points([first, last], [first, last]).join("L")}`, stroke: "var(--muted)", "stroke-dasharray": "4 4" }));
  reading(svg, plot, steps, x);
  if (whole.across === "step") zooming(svg, steps, (at) => first + ((at - BOX.left) / (BOX.right - BOX.left)) * (last - first));
  const figure = h("figure", {}, h("figcaption", {}, h("strong", {}, plot.title), plot.about && h("span", { class: "muted" }, ` ${plot.about}`)), svg,
    plot.curves.length > 1 && h("ul", { class: "keys" }, plot.curves.map((c) => h("li", { class: `k${c.place % 8}` }, c.name))),
    plot.curves[0].band && h("p", { class: "muted small" }, `band: ${plot.curves[0].band}`));
  figure.plot = whole;
  return figure;
}

const across = (svg, event) => (event.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width * WIDE;

// a range that is dragged over, or half of what is shown around the step that is told
function zooming(svg, steps, step) {
  const mark = s("rect", { y: BOX.top, height: BOX.bottom - BOX.top, fill: "var(--link)", "fill-opacity": 0.2, width: 0 });
  let from = null;
  const drawn = (at) => { mark.setAttribute("x", Math.min(from, at)); mark.setAttribute("width", Math.abs(at - from)); };
  svg.append(mark);
  svg.addEventListener("pointerdown", (event) => { if (event.button === 0) { from = across(svg, event); svg.setPointerCapture(event.pointerId); } });
  svg.addEventListener("pointermove", (event) => from !== null && drawn(across(svg, event)));
  svg.addEventListener("pointercancel", () => { from = null; mark.setAttribute("width", 0); });
  svg.addEventListener("pointerup", (event) => {
    const ends = [from, across(svg, event)].map(step).sort((a, b) => a - b), far = from !== null && Math.abs(across(svg, event) - from) > 12;
    from = null;
    mark.setAttribute("width", 0);
    if (far && steps.some((each) => each >= ends[0] && each <= ends[1])) zoom(...ends);
  });
  svg.addEventListener("dblclick", () => zoom(null, null));
  svg.addEventListener("keydown", (event) => {
    const middle = Number(svg.dataset.step ?? steps[Math.floor(steps.length / 2)]), quarter = (steps[steps.length - 1] - steps[0]) / 4;
    if (event.key === "-") zoom(null, null);
    if (event.key === "+" && quarter > 0) zoom(middle - quarter, middle + quarter);
  });
}

function reading(svg, plot, steps, x) {
  const mark = s("g", {});
  let place = -1;
  svg.append(mark);
  const show = (to) => {
    if (to === place) return;
    place = Math.max(0, Math.min(steps.length - 1, to));
    const step = steps[place];
    svg.dataset.step = step;
    const lines = plot.curves.filter((c) => c.steps[0] <= step && step <= c.steps[c.steps.length - 1]).map((c) => {
      const n = c.steps.findLastIndex((each) => each <= step);
      return `${c.name}: ${number(c.values[n])}${c.band && c.interval ? ` (${number(c.low[n])} to ${number(c.high[n])})` : ""}`;
    });
    mark.replaceChildren(s("path", { d: `M${x(step)} ${BOX.top}V${BOX.bottom}`, stroke: "var(--muted)" }),
      ...[`${plot.across} ${number(step, 6)}`, ...lines].map((text, n) => s("text", { class: "value", x: BOX.left + 5, y: BOX.top + 12 * (n + 1) }, text)));
    status([`${plot.title}, ${plot.across} ${number(step, 6)}`, ...lines].join("; "));
  };
  const hide = () => { place = -1; mark.replaceChildren(); status(""); };
  svg.addEventListener("pointermove", (event) => {
    const at = across(svg, event);
    show(steps.reduce((best, step, n) => (Math.abs(x(step) - at) < Math.abs(x(steps[best]) - at) ? n : best), 0));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    show(Math.max(0, place + by));
  });
}

// ------------------------------------------------------------------------------------------------------- the page

const VIEWS = { runs, groups, group, run, pair, trainings, training };
const NAMES = { runs: "Runs", groups: "Groups", trainings: "Trainings" };
const KEYS = [["j, k", "next, previous row or turn"], ["Enter", "open"], ["c", "best and worst of the group side by side"], ["[ ]", "another sibling on the right"], ["x", "swap the sides"],
  ["g", "the group"], ["u", "back"], ["/", "search"], ["← →", "values, on tokens and curves"], ["?", "these keys"]];
let leaving = new AbortController(), shown = {}, turnOf = 0;

const status = (text) => { document.getElementById("status").textContent = visible(text); };
const heading = (text) => { document.title = `${visible(text.textContent ?? text).slice(0, 100)} · nano`; return h("h1", { tabindex: -1 }, text); };
const fail = (problem) => document.getElementById("main").append(h("p", { class: "bad", role: "alert" }, problem.message));

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const mine = ++turnOf;
  const [, name, text] = /^#\/(\w+)(?:\?(.*))?$/.exec(location.hash || (page ? page.start : "#/runs")) || ["", "runs", ""];
  const view = Object.hasOwn(VIEWS, name) ? name : "runs", main = h("div");
  document.querySelectorAll("#nav a").forEach((a) => a.hash === `#/${view}` ? a.setAttribute("aria-current", "page") : a.removeAttribute("aria-current"));
  shown = {};
  status("");
  document.getElementById("main").replaceChildren(main);
  try {
    const found = (await VIEWS[view](main, Object.fromEntries(new URLSearchParams(text || "")))) || {};
    if (mine !== turnOf) return;
    shown = found;
    if (found.after) found.after();
    else scrollTo(0, 0);
    main.querySelector("h1")?.focus({ preventScroll: true });
  } catch (problem) {
    if (mine === turnOf) fail(problem);
  }
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const actions = { j: () => shown.step?.(1), k: () => shown.step?.(-1), u: () => history.back(), "?": help, "/": () => document.querySelector("input[name=text]")?.focus(), ...shown.keys };
  if (!Object.hasOwn(actions, event.key)) return;
  event.preventDefault();
  actions[event.key]();
}

const help = () => document.getElementById("keys").showModal();

function start() {
  const present = page ? Object.keys(NAMES).filter((name) => name in page.answers) : Object.keys(NAMES);
  document.getElementById("nav").append(...present.map((name) => h("li", {}, h("a", { href: `#/${name}` }, NAMES[name]))));
  document.getElementById("keys").append(h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])), h("form", { method: "dialog" }, h("button", {}, "Close")));
  document.getElementById("help").addEventListener("click", help);
  addEventListener("hashchange", show);
  addEventListener("keydown", press);
  if (!page) setInterval(() => document.visibilityState === "visible" && Promise.resolve(shown.refresh?.()).catch(() => status("not up to date: the viewer's server does not answer")), 2500);
  show();
}

start();
