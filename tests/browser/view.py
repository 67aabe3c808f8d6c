"""What a person sees of the monitor in JupyterLab, and does there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from lab import Lab
from playwright.sync_api import Locator, Page, TimeoutError, WebSocket, expect

# What a browser and JupyterLab say of a server or a kernel that is away, which tests do on purpose.
NOT_OURS = (
    "net::ERR_",
    "WebSocket connection to",
    "Failed to load resource",
    "Failed to fetch",
    "Could not restore the debugger state",
    "Canceled future for",
)
# How often a page is asked: at each frame, it would be busy with the answers.
POLL_MS = 100
# Before the monitor's code is there, the panel says nothing.
SAYS = """([...document.querySelectorAll('#gpumagic-panel div')].find(node => node.shadowRoot)
    ?.shadowRoot.querySelector('.all').innerText ?? '')"""


class View:
    """A page with the panel.

    Parameters
    ----------
    page : Page
    lab : Lab
    name : str
        Of the workspace.
    """

    def __init__(self, page: Page, lab: Lab, name: str) -> None:
        self.page = page
        self.lab = lab
        self.errors: list[str] = []
        # Set by a test that cannot leave the page as it found it.
        self.spoiled = False
        self._name = name
        self._hearing: dict[str, list[Callable[[dict[str, object]], object]]] = {}
        page.on("websocket", self._socket)
        page.on("pageerror", lambda error: self._said("error", f"{error.message}\n{error.stack}"))
        page.on("console", lambda message: self._said(message.type, message.text))

    def _said(self, kind: str, text: str) -> None:
        if kind == "error" and not any(part in text for part in NOT_OURS):
            self.errors.append(text)

    def _socket(self, socket: WebSocket) -> None:
        if "/gpumagic/api/stream" in socket.url:
            socket.on("framereceived", self._message)
            socket.on("framesent", self._message)

    def _message(self, text: str | bytes) -> None:
        message = json.loads(text)
        for hear in self._hearing.get(message["type"], ()):
            hear(message)

    def on_message(self, kind: str, hear: Callable[[dict[str, object]], object]) -> None:
        """Calls with each message of the stream of this kind, either way."""
        self._hearing.setdefault(kind, []).append(hear)

    def wait_until(self, holds: Callable[[], object], seconds: float = 30) -> None:
        """Lets the page go on until this holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it did not come to hold"
            # Playwright's events are told while it waits.
            self.page.wait_for_timeout(POLL_MS)

    @property
    def panel(self) -> Locator:
        return self.page.locator("#gpumagic-panel")

    @property
    def status(self) -> Locator:
        return self.page.locator(".jp-gpumagic-status button")

    def load(self) -> None:
        """Loads the page, the first time or again."""
        self.page.goto(self.lab.page(self._name))
        self.page.wait_for_function(
            "window.jupyterapp && window.jupyterapp.restored", polling=POLL_MS
        )
        self.page.evaluate("window.jupyterapp.restored.then(() => true)")

    def open_panel(self) -> None:
        self.page.evaluate("window.jupyterapp.commands.execute('gpumagic:show')")
        self.panel.wait_for()

    def reset(self) -> None:
        """Makes it as it was when the first test began: no document, no setting, two idle GPUs."""
        self._hearing.clear()
        self.close_documents()
        self._settings(
            "for (const key of Object.keys((await registry.load(id)).user))"
            " await registry.remove(id, key);"
        )
        self.panel.locator(".death .close").evaluate_all("all => all.forEach(one => one.click())")
        self.page.evaluate("localStorage.clear()")
        self.lab.forget()
        self.lab.machine()
        self.open_panel()
        self.shows("H100")
        # The virtual GPUs of a notebook, and its row: its buttons would take a Tab.
        self.hides("virtual")
        notebooks = self.panel.locator("li.process").filter(has_not_text="system")
        expect(notebooks).to_have_count(0)

    def choose(self, menu: str, item: str) -> None:
        """Chooses an item; JupyterLab closes an open menu whenever a document becomes active."""
        found = self.page.get_by_role("menuitem", name=item, exact=True)

        def is_open() -> bool:
            if not found.is_visible():
                self.page.get_by_role("menuitem", name=menu, exact=True).click()
            return found.is_visible()

        self.wait_until(is_open)
        found.click()

    def close_documents(self) -> None:
        """Closes all, saved or not."""
        self.page.evaluate(
            "[...window.jupyterapp.shell.widgets('main')].forEach(widget => widget.dispose())"
        )

    def save_layout(self) -> None:
        """Waits until JupyterLab has saved which panels are open."""
        with self.page.expect_response(lambda r: "/api/workspaces/" in r.url, timeout=10_000):
            self.page.evaluate("window.jupyterapp.shell.collapseLeft()")

    def shows(self, text: str, timeout_ms: float | None = None) -> None:
        """Waits until the panel says this."""
        self._wait(text, True, timeout_ms)

    def hides(self, text: str) -> None:
        """Waits until the panel says this no longer."""
        self._wait(text, False, None)

    def _wait(self, text: str, there: bool, timeout_ms: float | None) -> None:
        try:
            self.page.wait_for_function(
                f"([text, there]) => {SAYS}.includes(text) === there",
                arg=[text, there],
                timeout=timeout_ms,
                polling=POLL_MS,
            )
        except TimeoutError:
            wish = "not to say" if not there else "to say"
            raise AssertionError(f"waited for the panel {wish} {text!r}:\n{self.says()}") from None

    def says(self) -> str:
        """All that the panel says."""
        return str(self.page.evaluate(SAYS))

    def open_notebook(self, name: str) -> None:
        """Opens a notebook and waits for its kernel."""
        self.page.evaluate(
            """async name => {
                const panel = await window.jupyterapp.commands.execute(
                    'docmanager:open', {path: name});
                await panel.context.ready;
                await panel.sessionContext.ready;
            }""",
            name,
        )

    def run_cell(self, number: int) -> None:
        """Begins to run a cell of the current notebook; does not wait for its end."""
        self.page.evaluate(
            """number => {
                window.jupyterapp.shell.currentWidget.content.activeCellIndex = number;
                void window.jupyterapp.commands.execute('notebook:run-cell');
            }""",
            number,
        )

    def wait_ran(self, number: int) -> None:
        """Waits until a cell of the current notebook has run."""
        self.page.wait_for_function(
            """number => {
                const cell = window.jupyterapp.shell.currentWidget.content.widgets[number];
                return cell.model.executionCount !== null;
            }""",
            arg=number,
            timeout=60_000,
            polling=POLL_MS,
        )

    def set(self, **settings: object) -> None:
        """Changes settings of the plugin; they hold at once, and until the test ends."""
        self._settings(
            "for (const [key, value] of Object.entries(settings))"
            " await registry.set(id, key, value);",
            settings,
        )

    def _settings(self, change: str, settings: object = None) -> None:
        """Has a page's registry of settings do something with those of the plugin."""
        self.page.evaluate(
            """async settings => {
                const app = window.jupyterapp;
                const token = [...app.pluginRegistry._services.keys()]
                    .find(one => one.name.endsWith(':ISettingRegistry'));
                const registry = await app.resolveRequiredService(token);
                const id = 'gpumagic:plugin';
                CHANGE
            }""".replace("CHANGE", change),
            settings,
        )
