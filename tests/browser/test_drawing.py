"""The renderer in a real Chromium, as the widget ships it: what it writes, and what fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from snapshots import snapshot_in

from gpumagic.errors import Problem
from gpumagic.gputable.gpu_table import GpuTable

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "gpumagic" / "static" / "widget.js"
SNAPSHOT = snapshot_in((ROOT / "tests/data/snapshot.json").read_text())
CUT, SLICE, BUSY, *_ = SNAPSHOT.gpus
LONG = "a notebook with a rather long name that goes on and on.ipynb"

# A page with the widget over a model that the test fills; frames are drawn when it says so.
OPEN = """async ([source, state]) => {
    const url = URL.createObjectURL(new Blob([source], {type: 'text/javascript'}));
    const widget = (await import(url)).default;
    const calls = {};
    const empty = {period: 1, snapshot: {}, history: {}, cells: [], results: [],
        timing: {}, timings: [], variables: {}};
    const model = {
        state: {...empty, ...state},
        get(name) { return this.state[name]; },
        on(event, call) { calls[event] = call; },
        off() {},
        send() {},
    };
    document.body.innerHTML = '<div id="at"></div>';
    const el = document.getElementById('at');
    let frames = [];
    const later = window.requestAnimationFrame;
    window.requestAnimationFrame = call => frames.push(call);
    window.cancelAnimationFrame = () => {};
    window.draw = () => { const due = frames; frames = []; for (const call of due) call(0); };
    window.take = snapshot => { model.state.snapshot = snapshot; calls['change:snapshot'](); };
    window.painted = () => new Promise(done => later(() => later(done)));
    widget.render({model, el});
    window.root = el.firstElementChild.shadowRoot;
    draw();
    await painted();
    draw();
}"""
CHANGED = """async snapshot => {
    const next = structuredClone(snapshot);
    next.time += 1;
    for (const [n, gpu] of next.gpus.entries()) {
        gpu.utilization = (gpu.utilization + 7 * n + 1) % 101;
        gpu.memory_used = Math.floor(gpu.memory_used / 2);
        gpu.temperature += 1 + n % 3;
    }
    take(snapshot);
    draw();
    await painted();
    const changes = new MutationObserver(() => {});
    changes.observe(root, {subtree: true, childList: true, attributes: true, characterData: true});
    take({...snapshot, time: snapshot.time + 0.5});
    draw();
    const same = changes.takeRecords().length;
    take(next);
    draw();
    const records = changes.takeRecords();
    const elements = records.flatMap(each => [...each.addedNodes, ...each.removedNodes])
        .filter(node => node.nodeType === Node.ELEMENT_NODE);
    return [same, records.length, elements.length];
}"""
SPILLED = """() => [...root.querySelectorAll('*')]
    .filter(node => node.getBoundingClientRect().right > innerWidth + 0.5)
    .map(node => node.outerHTML.slice(0, 80))"""
INK = """() => {
    const canvas = root.querySelector('canvas');
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    const at = [...Array(data.length / 4).keys()].filter(n => data[4 * n + 3] > 200);
    return [...new Set(at.map(n => `${data[4 * n]},${data[4 * n + 1]},${data[4 * n + 2]}`))];
}"""


def crowd(count):
    """So many GPUs, with a process on each."""
    gpus = [replace(BUSY, uuid=f"GPU-{n}", index=n, xid=None, throttle=()) for n in range(count)]
    process = SNAPSHOT.processes[0]
    held = [replace(process, uuid=gpu.uuid, pid=n) for n, gpu in enumerate(gpus)]
    return replace(SNAPSHOT, gpus=tuple(gpus), processes=tuple(held), problems=())


def history(snapshot, seconds=600):
    times = [snapshot.time - seconds + n for n in range(seconds)]
    column = {
        "utilization": [n % 100 for n in range(seconds)],
        "memory_used": [n * 2**26 for n in range(seconds)],
        "power": [],
        "held": {},
    }
    return {"time": times, "gpus": {gpu.uuid: column for gpu in snapshot.gpus}}


@pytest.fixture(scope="module")
def page(context):
    """A page without JupyterLab."""
    made = context.new_page()
    yield made
    made.close()


@pytest.fixture
def opened(page):
    """Opens the widget on a snapshot in a page of some width; ends with no error in the page."""
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))

    def open_(snapshot, width, height=800):
        page.set_viewport_size({"width": width, "height": height})
        # What the last test left is gone.
        page.goto("about:blank")
        state = {"snapshot": snapshot.to_dict(), "history": history(snapshot)}
        page.evaluate(OPEN, [SCRIPT.read_text("utf-8"), state])
        return page

    yield open_
    assert errors == []


@pytest.mark.parametrize("count", [8, 64])
def test_an_update_changes_figures_and_rebuilds_nothing(opened, count):
    snapshot = crowd(count)
    page = opened(snapshot, 300)
    same, changed, elements = page.evaluate(CHANGED, snapshot.to_dict())
    assert elements == 0
    # Of figures that are as they were, none is written; of the others, each once or twice.
    assert same <= 2
    assert count <= changed <= 8 * count


WRONG = replace(
    BUSY,
    name="NVIDIA RTX 6000 Ada Generation with a name that does not end",
    ecc_uncorrected=12,
    age=12.0,
    fan=55.0,
)
FULL = tuple(
    replace(process, uuid=BUSY.uuid, notebook=LONG, kernel=f"k{n}", pid=n)
    for n, process in enumerate(SNAPSHOT.processes)
)
NONE = replace(
    SNAPSHOT,
    gpus=(),
    problems=(Problem("x", "the-cause-in-one-long-word" * 4, "type %gpus --doctor " * 5),),
)


@pytest.mark.parametrize(
    "snapshot",
    [
        SNAPSHOT,
        crowd(8),
        crowd(64),
        replace(SNAPSHOT, gpus=(CUT, SLICE, WRONG), processes=FULL),
        NONE,
    ],
    ids=["fixture", "8", "64", "faults", "none"],
)
@pytest.mark.parametrize("width", [260, 900])
def test_nothing_spills(opened, snapshot, width):
    page = opened(snapshot, width)
    page.evaluate("root.querySelectorAll('.open').forEach((button, n) => n < 3 && button.click())")
    page.evaluate("painted().then(draw)")
    assert page.evaluate(SPILLED) == []


def test_the_table_of_gpus_fits_700_pixels(page):
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA RTX 6000 Ada Generation")
    gpus = [
        replace(BUSY, uuid=f"GPU-{n}", index=n + 1, ordinal=n, name=name)
        for n, name in enumerate(names)
    ]
    table = GpuTable(replace(SNAPSHOT, gpus=tuple(gpus)))
    page.set_viewport_size({"width": 700, "height": 600})
    page.set_content(f"<body style='margin: 0; font: 13px system-ui'>{table._repr_html_()}")
    right = "nodes => Math.max(...nodes.map(node => node.getBoundingClientRect().right))"
    assert page.locator("table").evaluate_all(right) <= 700
    # The name is cut, and no figure is.
    assert page.get_by_text("698 / 700 W").count() == 2


def test_a_gpu_with_two_holders_is_low(opened):
    process = replace(SNAPSHOT.processes[0], uuid=BUSY.uuid, idle_since=None, mine=False)
    two = [replace(process, pid=n, kernel=f"{n}", notebook=f"{n}.ipynb") for n in (1, 2)]
    held = sum(process.memory for process in two)
    well = {"xid": None, "throttle": (), "temperature": 60}
    one = replace(BUSY, memory_used=held, memory_reserved=None, **well)
    page = opened(
        replace(SNAPSHOT, gpus=(one,), processes=tuple(two), problems=(), kernels=()), 300
    )
    assert page.evaluate("root.querySelectorAll('li.process').length") == 2
    assert page.evaluate("root.querySelector('.gpu').offsetHeight") <= 142


def test_charts_follow_the_theme(opened):
    page = opened(crowd(1), 300)
    page.evaluate(
        "document.head.insertAdjacentHTML('beforeend',"
        " '<style>.night { --jp-success-color1: rgb(255, 0, 255) }</style>')"
    )
    assert "255,0,255" not in page.evaluate(INK)
    page.evaluate("document.body.className = 'night'")
    later = replace(crowd(1), time=SNAPSHOT.time + 1).to_dict()
    page.evaluate("later => { take(later); draw(); }", later)
    assert "255,0,255" in page.evaluate(INK)


def test_in_forced_colors_bars_are_still_told_apart(opened, page):
    page.emulate_media(forced_colors="active")
    opened(SNAPSHOT, 300)
    colors = page.evaluate(
        """['own', 'other', 'system'].map(name =>
            getComputedStyle(root.querySelector('.bar .' + name)).color)"""
    )
    page.emulate_media(forced_colors="null")
    assert len(set(colors)) == 3


def test_the_keyboard_opens_a_gpu(opened):
    page = opened(crowd(4), 300)
    for key, expanded in (("Enter", "true"), (" ", "false"), ("Enter", "true")):
        if key == "Enter" and expanded == "true":
            page.evaluate("root.querySelector('.open').focus()")
        page.keyboard.press(key)
        page.evaluate("draw()")
        assert page.evaluate("root.querySelector('.open').ariaExpanded") == expanded
    page.evaluate("root.querySelector('.axis > .more').focus()")
    page.keyboard.press("Enter")
    page.evaluate("draw()")
    assert page.evaluate("root.querySelector('.facts').textContent").startswith("Memory activity")


def test_a_hidden_monitor_draws_nothing(opened):
    snapshot = crowd(2)
    page = opened(snapshot, 300)
    page.evaluate("document.getElementById('at').style.display = 'none'")
    page.evaluate("painted().then(painted)")
    before = page.evaluate("root.textContent")
    later = replace(snapshot, time=snapshot.time + 1, driver="1.2.3", cuda=None).to_dict()
    page.evaluate("later => { take(later); draw(); }", later)
    assert page.evaluate("root.textContent") == before
    page.evaluate("document.getElementById('at').style.display = ''")
    page.evaluate("painted().then(painted).then(draw)")
    assert "driver 1.2.3" in page.evaluate("root.textContent")
