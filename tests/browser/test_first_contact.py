"""A stranger's path: an empty JupyterLab, no GPU, and a button that leads on from there."""

from playwright.sync_api import expect

NO_DRIVER = {"fail.*": 12, "fail.nvmlInitWithFlags": 12}
PLACED = "%%ongpu 1\nimport torch\nx = torch.ones(300, 300)\n(x @ x).device"
TIMED = "%%gputime cpu 1 --max-time 0.2\nx @ x"
KERNEL_IN_HELP = "window.jupyterapp.commands.hasCommand('help-menu-python3:banner')"
FOCUSED = "document.getElementById('gpumagic-panel').contains(document.activeElement)"


def run(view, number, code):
    """Types a cell as a person does, and runs it; the cell."""
    view.page.evaluate("window.jupyterapp.commands.execute('notebook:enter-edit-mode')")
    view.page.keyboard.insert_text(code)
    view.page.keyboard.press("Shift+Enter")
    return view.page.locator(".jp-NotebookPanel .jp-Cell").nth(number)


def goes_to_the_cell_of_a_mark(view):
    """A press on its mark selects the cell; the keyboard begins with the newest one."""
    active = "window.jupyterapp.shell.currentWidget.content.activeCellIndex"
    view.page.evaluate(f"{active} = 0")
    view.panel.locator("canvas[tabindex]").last.focus()
    expect(view.panel.locator(".tip")).to_contain_text("In [3]")
    view.page.keyboard.press("Enter")
    view.wait_until(lambda: view.page.evaluate(active) == 2)


def test_a_stranger_comes_from_nothing_to_a_timing(lab, new_view):
    view, page = new_view, new_view.page
    lab.machine(NO_DRIVER)
    view.load()
    # JupyterLab opens its launcher once all is restored, and gives it the focus.
    expect(page.locator(".jp-Launcher")).to_be_visible()
    page.get_by_role("menuitem", name="View", exact=True).click()
    page.get_by_role("menuitem", name="Show GPUs").click()
    view.shows("No GPU is visible here")
    view.wait_until(lambda: page.evaluate(FOCUSED))
    # One cause, and what a new user can type unchanged.
    expect(view.panel.locator(".advice")).to_have_count(1)
    view.shows("%load_ext gpumagic")
    assert "--doctor" not in view.says()
    view.panel.get_by_role("button", name="New notebook with 2 virtual GPUs").click()
    view.hides("No GPU is visible here")
    view.shows("cuda:1")
    expect(page.get_by_text("now has 2 virtual GPUs")).to_be_visible()
    expect(page.get_by_text("Type %%ongpu 1 at the top of a cell.")).to_be_visible()
    # What the button ran is the notebook's first cell, to be saved with it.
    expect(page.locator(".jp-NotebookPanel .jp-Cell").first).to_contain_text("%gpus --virtual 2")
    expect(page.locator(".jp-InputPrompt").first).to_have_text("[1]:")
    expect(run(view, 1, PLACED)).to_contain_text("cuda:1 (virtual)")
    timed = run(view, 2, TIMED)
    expect(timed).to_contain_text("times are the CPU's")
    expect(timed).to_contain_text("same")
    # What holds the memory, a press away: asked of the kernel, which counts no cell.
    view.panel.get_by_role("button", name="Variables (1): x 352 KiB").click()
    expect(view.panel.locator(".variable").filter(has_text="352 KiB")).to_contain_text("x")
    view.shows("as of In [3]")
    expect(page.locator(".jp-InputPrompt").nth(2)).to_have_text("[3]:")
    goes_to_the_cell_of_a_mark(view)
    outputs = page.locator(".jp-OutputArea")
    expect(outputs.filter(has_text="Error")).to_have_count(0)
    expect(page.locator("[data-mime-type='application/vnd.jupyter.stderr']")).to_have_count(0)


def test_the_tour_is_a_notebook_beside_the_panel(view):
    for _ in range(2):  # then the same one again
        view.choose("Help", "GPU Tour")
        tour = view.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        expect(tour).to_have_count(1)
        expect(tour.get_by_role("heading", name="GPU tour")).to_be_visible()
        expect(tour.locator(".jp-OutputArea-output")).to_have_count(0)
        expect(view.panel).to_be_visible()
        # JupyterLab adds the kernel's entries to this menu once, which closes the menu.
        view.wait_until(lambda: view.page.evaluate(KERNEL_IN_HELP))
    assert view.lab.request("api/contents/gpu-tour.ipynb?content=0")


def test_show_gpus_has_the_focus_whoever_gives_it_back(view):
    """The command palette activates the current document as soon as its command returns."""
    view.page.evaluate(
        """() => {
            const {commands, shell} = window.jupyterapp;
            void commands.execute('launcher:create');
            shell.collapseRight();
        }"""
    )
    view.page.wait_for_function("window.jupyterapp.shell.currentWidget !== null")
    view.page.evaluate(
        """() => {
            const {commands, shell} = window.jupyterapp;
            void commands.execute('gpumagic:show');
            shell.currentWidget.activate();
        }"""
    )
    view.page.wait_for_function(FOCUSED)
