"""Other pages: the panel in Notebook 7, and the widget where only anywidget's contract holds."""

import json
import re
from pathlib import Path

from playwright.sync_api import expect

CELLS = [
    "%load_ext gpumagic\n%gpus --virtual 1 --memory 8GiB\nimport torch",
    "%%ongpu 0\nweights = torch.empty(2 * 2**30 // 4)",
]


def test_the_panel_is_beside_a_notebook_of_notebook_7(lab, new_view):
    lab.write("placed.ipynb", CELLS)
    page = new_view.page
    page.goto(f"{lab.base}notebooks/placed.ipynb?token={lab.token}")
    expect(page.locator(".jp-CodeCell")).to_have_count(2)
    # What is typed before the kernel is there may be lost.
    indicator = page.locator(".jp-Notebook-ExecutionIndicator").first
    expect(indicator).to_have_attribute("data-status", "idle")
    new_view.choose("View", "Show GPUs")
    expect(page.locator("#gpumagic-panel")).to_be_visible()
    new_view.shows("H100")
    prompts = page.locator(".jp-InputArea-prompt").filter(has_text=re.compile(r"\[[*1]\]"))

    def runs():
        # A command that comes before the whole page is there may be lost.
        if not prompts.count():
            new_view.choose("Run", "Run All Cells")
        return prompts.count() > 0

    new_view.wait_until(runs)
    new_view.shows("2.0/8 GiB")
    new_view.shows("placed.ipynb")
    expect(
        page.locator(".jp-OutputArea-output").filter(has_text="cuda:0 (virtual)").last
    ).to_be_visible()
    box, notebook = (
        page.locator(name).first.bounding_box() for name in ("#gpumagic-panel", ".jp-Notebook")
    )
    assert box["x"] > notebook["x"]
    # One is of Notebook itself, about a schema.
    new_view.errors = [error for error in new_view.errors if "/gpumagic/" in error]
    lab.forget()


# All that a front end with anywidget gives a widget: VS Code, Colab, marimo.
BARE_HOST = """<body><div id="el"></div><script type="module">
import widget from '/widget.js';
const calls = new Map();
window.sent = [];
window.state = {period: 1, history: {}, cells: [], results: [], timing: {}, timings: [],
    variables: {}, table: 'kept', snapshot: {}};
const model = {
    get: name => window.state[name],
    set: (name, value) => { window.state[name] = value; calls.get(`change:${name}`)?.(); },
    on: (event, call) => calls.set(event, call), off: event => calls.delete(event),
    send: content => window.sent.push(content.type), save_changes: () => {},
};
window.model = model;
const end = await widget.render({model, el: document.getElementById('el')});
window.end = () => end();
</script></body>"""


def test_the_built_widget_needs_no_more_than_anywidgets_contract(shared_chromium):
    root = Path(__file__).parents[2]
    files = {
        "/": ("text/html", BARE_HOST),
        "/widget.js": ("text/javascript", (root / "gpumagic/static/widget.js").read_text()),
    }
    page = shared_chromium.context.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))

    def serve(route):
        kind, body = files["/" + route.request.url.rpartition("/")[2]]
        route.fulfill(body=body, content_type=kind)

    page.route("https://host.example/*", serve)
    page.goto("https://host.example/")
    page.wait_for_function("!!window.end")
    snapshot = json.loads((root / "tests/data/snapshot.json").read_text())
    page.evaluate("snapshot => window.model.set('snapshot', snapshot)", snapshot)
    gpu = snapshot["gpus"][0]
    expect(page.locator("#el")).to_contain_text(gpu["name"].split()[1])
    assert page.evaluate("window.sent[0]") == "alive"
    page.evaluate("window.end()")
    assert page.evaluate("document.getElementById('el').childElementCount") == 0
    assert page.evaluate("window.sent.at(-1)") == "gone"
    assert errors == []
    page.close()
