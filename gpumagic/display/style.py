"""The looks that everything gpumagic shows in HTML has in common.

Text takes the colour of the page around it, and neutral greys are see-through, so that both stay
legible wherever the HTML ends up: JupyterLab, VS Code, Colab, a saved page. Accents are
JupyterLab's where it is there, else one of two sets, for light and for dark.
"""

from __future__ import annotations

from html import escape

CSS = """
.gpumagic {
  --gm-mine: var(--jp-brand-color1, #1976d2);
  --gm-others: var(--jp-warn-color1, #ef8a17);
  --gm-good: var(--jp-success-color1, #388e3c);
  --gm-bad: var(--jp-error-color1, #d32f2f);
  --gm-line: rgba(128, 128, 128, .28);
  --gm-track: rgba(128, 128, 128, .2);
  --gm-reserved: rgba(128, 128, 128, .55);
  color: var(--jp-content-font-color1, inherit);
  font: 13px/1.45 var(--jp-ui-font-family, var(--vscode-font-family, system-ui, sans-serif));
  font-variant-numeric: tabular-nums;
  max-width: 100%;
  overflow-x: auto;
  text-align: left;
}
@media (prefers-color-scheme: dark) {
  .gpumagic {
    --gm-mine: var(--jp-brand-color1, #64b5f6);
    --gm-others: var(--jp-warn-color1, #ffb74d);
    --gm-good: var(--jp-success-color1, #66bb6a);
    --gm-bad: var(--jp-error-color1, #ef5350);
  }
}
.gpumagic.gpumagic table {
  border-collapse: collapse;
  color: inherit;
  font-size: inherit;
  margin: 0;
  table-layout: auto;
  width: auto;
}
.gpumagic.gpumagic thead { border: 0; }
.gpumagic.gpumagic tbody tr:nth-child(n), .gpumagic.gpumagic tbody tr:nth-child(n):hover {
  background: transparent;
}
.gpumagic.gpumagic th, .gpumagic.gpumagic td {
  border: 0;
  border-top: 1px solid var(--gm-line);
  line-height: inherit;
  padding: 4px 18px 4px 0;
  text-align: left;
  vertical-align: middle;
  white-space: nowrap;
}
.gpumagic.gpumagic th {
  border-top: 0;
  font-size: 11px;
  font-weight: 500;
  opacity: .65;
  padding-bottom: 2px;
}
.gpumagic.gpumagic td:last-child, .gpumagic.gpumagic th:last-child { padding-right: 2px; }
.gpumagic.gpumagic .gm-number { text-align: right; }
.gpumagic .gm-this { font-weight: 600; }
.gpumagic .gm-dim { opacity: .65; }
.gpumagic .gm-bad { color: var(--gm-bad); }
.gpumagic .gm-ok { color: var(--gm-good); }
.gpumagic.gpumagic .gm-tight { padding-right: 0; }
.gpumagic .gm-caption { font-size: 12px; opacity: .65; padding: 2px 0 6px; }
.gpumagic .gm-note { font-size: 12px; opacity: .8; padding: 6px 0 0; }
.gpumagic .gm-place { font-family: var(--jp-code-font-family, ui-monospace, monospace); }
.gpumagic b.gm-place { font-weight: 600; }
.gpumagic .gm-badge {
  border: 1px solid currentColor;
  border-radius: 3px;
  font-size: 10.5px;
  letter-spacing: .02em;
  margin-left: 6px;
  opacity: .75;
  padding: 0 4px;
}
.gpumagic .gm-bar {
  background: var(--gm-track);
  border-radius: 3px;
  display: inline-flex;
  height: 10px;
  margin-right: 10px;
  overflow: hidden;
  vertical-align: -1px;
  width: 150px;
}
.gpumagic .gm-bar.gm-short { margin-right: 8px; width: 44px; }
.gpumagic .gm-bar > i { display: block; flex: none; height: 100%; }
.gpumagic .gm-mine { background: var(--gm-mine); }
.gpumagic .gm-others { background: var(--gm-others); }
.gpumagic .gm-reserved { background: var(--gm-reserved); }
.gpumagic .gm-busy { background: var(--gm-good); }
.gpumagic .gm-legend { font-size: 11px; padding: 5px 0 2px; }
.gpumagic .gm-legend i {
  border-radius: 2px;
  display: inline-block;
  height: 8px;
  margin: 0 5px 0 0;
  width: 8px;
}
.gpumagic .gm-legend span { margin-right: 14px; opacity: .7; }
.gpumagic.gpumagic .gm-section { margin-top: 10px; }
.gpumagic.gpumagic .gm-wrap { white-space: normal; }
.gpumagic .gm-wrap span { display: inline-block; margin-right: 14px; white-space: nowrap; }
.gpumagic.gpumagic .gm-name {
  max-width: 250px;
  overflow: hidden;
  text-overflow: ellipsis;
}
.gpumagic .gm-problem {
  border-left: 3px solid var(--gm-others);
  margin: 6px 0 2px;
  padding: 1px 0 1px 10px;
}
.gpumagic .gm-problem code {
  background: var(--gm-track);
  border-radius: 3px;
  color: inherit;
  font-family: var(--jp-code-font-family, ui-monospace, monospace);
  font-size: 12px;
  padding: 0 4px;
}
"""


def block(content: str) -> str:
    """HTML that brings its looks along and changes nothing outside itself."""
    return f'<div class="gpumagic"><style>{CSS}</style>{content}</div>'


def tag(name: str, text: object, css: str = "", title: str = "") -> str:
    """One element around text, which is escaped."""
    attributes = f' class="{css}"' if css else ""
    if title:
        attributes += f' title="{escape(title)}"'
    return f"<{name}{attributes}>{escape(str(text))}</{name}>"


def bar(parts: list[tuple[str, float]], label: str, *, short: bool = False) -> str:
    """A bar of coloured parts, each a CSS class and its share from 0 to 1, with a label for those
    who do not see it."""
    left = 1.0
    pieces = []
    for css, part in parts:
        # Together never more than the bar, whatever the driver says.
        width = min(max(part, 0.0), left)
        left -= width
        if width > 0:
            pieces.append(f'<i class="{css}" style="width:{100 * width:.2f}%"></i>')
    css = "gm-bar gm-short" if short else "gm-bar"
    text = escape(label)
    attributes = f'class="{css}" role="img" aria-label="{text}" title="{text}"'
    return f"<span {attributes}>{''.join(pieces)}</span>"
