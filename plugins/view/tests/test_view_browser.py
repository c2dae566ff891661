"""The viewer in a real browser: by keyboard, on a phone, in the dark, against a hostile run, and live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser import Browser, Page, browser, needs_browser, serving
from viewed import LINE, hostile, log_of, run, seen, turn

from nano_apis.app import serve_app
from nano_apis.conversations import Conversations
from nano_apis.served_models import ServedModel
from nano_coder.agent.profiles import HERMES_1
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.serve.access import Access
from nano_shared.store import LogStore
from nano_view.answers import LogView
from nano_view.app import view_app
from nano_view.page import log_answers, write_page

pytestmark = needs_browser
DIFF = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LogStore:
    """A group with a success and a failure, forks, a hostile pair, a long run, and 600 others."""
    group = [
        run("best", turn(0), turn(1, (5, 6, 8)), key="sum", at=900.0, diff=DIFF),
        run("worst", turn(0), turn(1, (5, 6, 9)), key="sum", at=901.0, reward=0.0),
        run("middle", turn(0), turn(1, (5, 7)), key="sum", at=902.0, reward=0.5),
        run("fork", turn(0), turn(1, (4, 4)), key="sum", at=903.0, parent="best", parent_step=1),
    ]
    attacks = [hostile("hostile", at=904.0), hostile("hostile-2", at=905.0, reward=1.0, sampled=(9, 8))]
    long = run("long", turn(observation=seen(LINE)), key="long", at=906.0, reward=None)
    many = [run(f"many-{n:03}", key=f"task-{n // 8}", at=float(n)) for n in range(600)]
    return log_of(tmp_path_factory.mktemp("view") / "log.db", [*many, *group, *attacks, long])


@pytest.fixture(scope="module")
def root(store: LogStore) -> Iterator[str]:
    with serving(view_app(LogView(store))) as address:
        yield address


@pytest.fixture(scope="module")
def file(store: LogStore, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("file") / "page.html"
    write_page(path, log_answers(LogView(store), 20), start="#/runs", title="log")
    return path.as_uri()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def shown(chromium: Browser) -> Iterator[Page]:
    with chromium.page(viewport={"width": 1200, "height": 900}) as page:
        yield page


@pytest.fixture(autouse=True)
def nothing_is_complained_about(shown: Page) -> Iterator[None]:
    shown.complaints.clear()
    yield
    assert shown.complaints == []


VIEWS = (
    "runs", "runs?by=model", "groups", "group?id=best", "run?id=best", "run?id=hostile", "run?id=fork",
    "trainings", "pair?left=hostile-2&right=hostile", "pair?left=best&right=worst",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_runs_nothing_and_asks_nobody_else(shown: Page, root: str, view: str) -> None:
    shown.asked.clear()
    page = shown.open(f"{root}#/{view}")
    page.wait_for_load_state("networkidle")
    assert "owned" not in page.title() or "<script>" in page.title()
    assert page.locator("main :is(script, img, iframe, object, style, base)").count() == 0
    assert page.evaluate(
        "[...document.querySelectorAll('*')].every(e => ![...e.attributes].some(a => /^on/.test(a.name)))"
    )
    assert all(url.startswith((root, "data:", "about:")) for url in shown.asked)


@pytest.mark.slow
def test_a_hostile_run_is_shown_as_text(shown: Page, root: str) -> None:
    page = shown.open(f"{root}#/run?id=hostile")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    text = page.inner_text("main")
    assert text.count("<script>document.title='owned'</script>") > 8
    assert "\\u202etxt.exe\\u0000\\u001b[31m \\ud800 \\udb40\\udc41 ünïcode 漢字" in text
    assert not {"\u202e", "\x00", "\x1b", "\U000e0041"} & set(text)
    assert page.title().startswith("Run hostile")


@pytest.fixture(scope="module")
def phone(chromium: Browser) -> Iterator[Page]:
    with chromium.page(viewport={"width": 400, "height": 800}, color_scheme="dark") as page:
        yield page


@pytest.mark.some(1)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_a_phone_and_is_accessible_in_the_dark_and_in_light(
    phone: Page, root: str, view: str
) -> None:
    page = phone.open(f"{root}#/{view}")
    page.wait_for_load_state("networkidle")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert not phone.overflows()
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        assert phone.violations() == []
        colours = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
        ink, paper = (sum(map(int, each[4:-1].split(","))) for each in colours)
        assert (ink > paper) is (scheme == "dark")


@pytest.mark.slow
def test_a_long_output_is_fetched_whole_on_demand(shown: Page, root: str) -> None:
    page = shown.open(f"{root}#/run?id=long")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    output = page.locator("pre[aria-label='Output of shell']")
    assert len(output.text_content()) < 20_000
    page.get_by_role("button", name=f"show all {len(LINE):,} characters").click()
    page.wait_for_function(
        "n => document.querySelector(\"pre[aria-label='Output of shell']\").textContent.length === n",
        arg=len(LINE),
    )
    assert page.evaluate("document.activeElement.tagName") == "PRE"


@pytest.mark.slow
def test_the_list_scrolls_through_every_run_and_keeps_few_rows(shown: Page, root: str) -> None:
    page = shown.open(f"{root}#/runs")
    page.wait_for_selector("tr.row")
    page.wait_for_function("""() => {
        scrollTo(0, document.body.scrollHeight);
        return [...document.querySelectorAll('tr.row')].some(row => row.textContent.startsWith('many-000'));
    }""")
    assert page.locator("tr.row").count() < 150
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_function("() => document.querySelector('tr.row').textContent.startsWith('long')")


@pytest.mark.slow
def test_filters_are_part_of_the_address(shown: Page, root: str) -> None:
    page = shown.open(f"{root}#/runs")
    page.locator("[name=task]").fill("sum")
    page.locator("[name=reward]").select_option("1 or more")
    page.wait_for_function("() => document.querySelectorAll('tr.row').length === 2")
    assert "task=sum" in page.url
    again = shown.open(page.url)
    again.wait_for_function("() => document.querySelectorAll('tr.row').length === 2")
    assert again.locator("[name=task]").input_value() == "sum"
    again.locator("[name=text]").fill("no such text")
    again.wait_for_selector("text=No run matches.")
    with again.expect_response(lambda answer: "runs" in answer.url):  # the list is asked for again
        pass
    again.wait_for_timeout(100)
    assert again.locator("text=No run matches.").is_visible()


@pytest.mark.slow
def test_a_list_is_put_in_order_and_added_up(shown: Page, root: str) -> None:
    page = shown.open(f"{root}#/runs?task=sum")
    page.wait_for_selector("p:has-text('4 runs, solved 50 % of 4')")
    page.get_by_label("Order").select_option("worst")
    page.wait_for_function("() => document.querySelector('tr.row')?.textContent.startsWith('worst')")
    page.get_by_label("Add up by").select_option("model")
    row = page.get_by_role("group", name="By model").locator("tbody tr")
    row.wait_for()
    assert row.inner_text().split() == ["tiny", "4", "50", "%", "of", "4", "-", "14", "-", "19", "8", "s"]
    assert {"task=sum", "sort=worst", "by=model"} <= set(page.url.partition("?")[2].split("&"))
    row.get_by_role("link", name="tiny").click()
    page.wait_for_function("() => document.querySelector('[name=policy]')?.value === 'tiny'")


def test_weeks_are_drawn(chromium: Browser, tmp_path: Path) -> None:
    week = 7 * 86_400.0
    log = log_of(tmp_path / "log.db", [
        run("a", reward=1.0), run("b", reward=0.0), run("c", at=3 * week, reward=1.0, policy="openai:big"),
        run("no date", at=1e15),
    ])  # fmt: skip
    with serving(view_app(LogView(log))) as root, chromium.page() as shown:
        page = shown.open(f"{root}#/runs?by=week")
        drawn = page.get_by_role("img", name="Runs with a verdict over the weeks from the newest")
        drawn.focus()
        drawn.press("ArrowRight")
        said = "weeks from the newest -3; solved here: 1; solved by a hosted model: 0; failed: 1"
        page.wait_for_function(
            "(said) => document.querySelector('#status').textContent.includes(said)", arg=said
        )
        assert page.locator("#status").inner_text().startswith("Runs with a verdict")
        assert shown.complaints == []


@pytest.mark.slow
def test_commands_and_the_first_lines_of_their_output_stand_open(chromium: Browser, tmp_path: Path) -> None:
    output, named = "\n".join(f"line {n}" for n in range(40)), "sha256:" + "0123456789abcdef" * 4
    log = log_of(tmp_path / "log.db", [
        run("open", turn(observation=seen(output)), key=named, prompt="Mend the cart", policy="/a/b/shop-1")
    ])  # fmt: skip
    with serving(view_app(LogView(log))) as root, chromium.page() as shown:
        page = shown.open(f"{root}#/run?id=open")
        text = page.inner_text(".turn")
        assert "command = ls" in text
        assert "line 7" in text
        assert "line 8" not in text
        page.get_by_role("button", name="show all 40 lines").click()
        page.wait_for_selector("pre:has-text('line 39')")
        head = page.inner_text("main dl")
        assert "Mend the cart" in head
        assert named not in head
        assert page.locator(f"[title='{named}']").inner_text() == "Mend the cart"
        assert page.locator("main dl [title='/a/b/shop-1']").inner_text() == "shop-1"
        assert shown.complaints == []


@pytest.mark.slow
def test_the_keyboard_goes_from_the_list_to_the_first_token_that_differs(shown: Page, root: str) -> None:
    page = shown.open(f"{root}#/runs?task=sum")
    page.wait_for_function("() => document.querySelectorAll('tr.row').length === 4")
    for key in ("j", "j", "k", "j"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.textContent") == "middle"
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Run middle')")
    page.keyboard.press("c")
    page.wait_for_selector("h1:has-text('Side by side')")
    assert "They share 9 tokens and first differ in a sampled token, in turn 2." in page.inner_text("main")
    assert page.locator(".differs").all_inner_texts() == ["[8]", "[9]"]
    assert page.evaluate(
        "(() => { const box = document.querySelector('.differs').getBoundingClientRect();"
        " return box.top >= 0 && box.bottom <= innerHeight })()"
    )
    page.keyboard.press("]")
    page.wait_for_selector("h2:has-text('Right: middle')")
    page.keyboard.press("x")
    page.wait_for_selector("h2:has-text('Left: middle')")
    page.keyboard.press("g")
    page.wait_for_selector("h1:has-text('sum')")
    page.keyboard.press("u")
    page.wait_for_selector("h1:has-text('Side by side')")
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Turn 2 of ")


def test_tokens_tell_their_values_to_pointer_and_keys(shown: Page, root: str) -> None:
    page = shown.open(f"{root}#/run?id=best")
    tokens = page.locator(".tokens").nth(1)
    tokens.locator("span").nth(2).hover()
    assert 'token 3 "[8]": log-prob -1 (36.8 %); advantage 0.5; version age 0' in page.inner_text("#status")
    assert tokens.locator("span").nth(2).get_attribute("class").startswith("s2")
    page.get_by_label("Colour tokens by").select_option("advantage")
    assert tokens.locator("span").nth(0).get_attribute("class") == "p3"
    tokens.focus()
    page.keyboard.press("ArrowRight")
    assert "token 3" in page.inner_text("#status") or "token 4" in page.inner_text("#status")
    page.get_by_label("Colour tokens by").select_option("log-prob")


def test_a_run_tells_its_calls_its_diff_its_forks_and_why_it_may_not_train(shown: Page, root: str) -> None:
    page = shown.open(f"{root}#/run?id=best")
    text = page.inner_text("main")
    assert "shell answered, exit 0" in text
    assert "Why it may not train" in text
    assert "other profile" in text
    assert page.locator(".added").all_inner_texts() == ["+++ b/x.py\n", "+x = 2\n"]
    assert page.locator(".tree a").all_inner_texts() == ["fork"]
    page.locator(".tree a").click()
    page.wait_for_selector("h1:has-text('Run fork')")
    assert page.locator(".turn.inherited").count() == 1


@pytest.mark.slow
def test_what_is_logged_meanwhile_appears(shown: Page, root: str, store: LogStore) -> None:
    page = shown.open(f"{root}#/runs?task=live")
    page.wait_for_selector("text=No run matches.")
    store.begin(
        run("live", key="live", at=950.0, stop=None, verdict=None, ended=None).model_copy(
            update={"turns": ()}
        )
    )
    page.locator("tr.row a", has_text="live").click()
    page.wait_for_selector("h1:has-text('Run live')")
    assert page.locator(".turn").count() == 0
    store.append_turn("live", turn(0))
    page.wait_for_selector(".turn")
    page.evaluate("document.querySelector('.turn details').open = true")
    store.append_turn("live", turn(1))
    page.wait_for_function("() => document.querySelectorAll('.turn').length === 2")
    assert page.evaluate("document.querySelector('.turn details').open"), "what was unfolded stays so"


def test_an_unknown_run_is_a_sentence(shown: Page, root: str) -> None:
    page = shown.page
    page.goto("about:blank")
    page.goto(f"{root}#/run?id=nothing")
    page.wait_for_selector("[role=alert]:has-text(\"no run 'nothing'\")")
    shown.complaints.clear()  # the browser's own line about the status 400


@pytest.mark.slow
def test_one_file_shows_the_same_without_a_server(shown: Page, file: str) -> None:
    shown.asked.clear()
    page = shown.open(file)
    page.wait_for_selector("tr.row")
    page.locator("[name=task]").fill("sum")
    page.wait_for_function("() => document.querySelectorAll('tr.row').length === 4")
    page.get_by_role("link", name="best", exact=True).click()
    page.wait_for_selector("h1:has-text('Run best')")
    page.keyboard.press("c")
    page.wait_for_selector(".differs")
    page.goto(f"{file}#/run?id=hostile")
    page.wait_for_selector("h1:has-text('Run hostile')")
    assert page.locator("main :is(script, img)").count() == 0
    assert {url.partition("#")[0] for url in shown.asked} <= {file, "about:blank", "data:,"}
    page.evaluate(
        "const script = document.createElement('script'); script.textContent = 'document.title = 1';"
        "document.body.append(script)"
    )
    assert page.title() != "1"
    assert "Content Security Policy" in shown.complaints.pop()


def test_a_file_of_the_hostile_run_alone_opens(shown: Page, store: LogStore, tmp_path: Path) -> None:
    from nano_view.page import run_answers

    write_page(
        tmp_path / "x.html", run_answers(LogView(store), ["hostile"]), start="#/run?id=hostile", title="x"
    )
    page = shown.open((tmp_path / "x.html").as_uri())
    assert page.title().startswith("Run hostile")


@pytest.mark.slow
def test_beside_the_server_the_log_is_shown_below_its_path(chromium: Browser, tmp_path: Path) -> None:
    log = LogStore.open(tmp_path / "log.db")
    policy = ScriptedPolicy(["Nice to meet you."], tokens=True)
    model = ServedModel(policy=policy, profile=HERMES_1, store=log, name="m")
    viewer = view_app(LogView(log), Access(admin_keys=["boss"]))
    app = serve_app(Conversations(model), access=Access(["client"], ["boss"]), pages={"view": viewer})
    with serving(app) as root, chromium.page() as shown:
        body = {"messages": [{"role": "user", "content": "Greet <b>me</b>."}]}
        client = {"authorization": "Bearer client"}
        assert httpx.post(f"{root}v1/chat/completions", json=body, headers=client).status_code == 200
        assert httpx.get(f"{root}view/", headers=client).status_code == 401
        page = shown.open(f"{root}view/?key=boss")
        assert page.url.partition("#")[0] == f"{root}view/"
        page.click("tbody tr a")
        page.wait_for_selector("text=Nice to meet you.")
        assert page.locator("main b").count() == 0
        assert all(url.startswith((f"{root}view", "data:", "about:")) for url in shown.asked)
        assert shown.complaints == []
