"""The panel in Notebook 7, whose page has no status bar and no launcher."""

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
    expect(
        page.locator(".jp-NotebookKernelStatus, .jp-Notebook-ExecutionIndicator").first
    ).to_be_visible()
    new_view.choose("View", "Show GPUs")
    expect(page.locator("#gpumagic-panel")).to_be_visible()
    new_view.shows("H100")
    page.locator(".jp-CodeCell .cm-content").first.click()
    for _ in CELLS:
        page.keyboard.press("Shift+Enter")
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
