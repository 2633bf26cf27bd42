"""The look of both reports, and the few lines of script that they have."""

from __future__ import annotations

from ._colours import GRID, INK, PAPER, QUIET, definitions, variable
from ._panels import MOST

_INK, _PAPER, _QUIET, _GRID = map(variable, (INK, PAPER, QUIET, GRID))


def style(lines: int) -> str:
    """Return the style sheet of a page whose plots have at most so many lines."""
    hidden = ",\n".join(
        f"fieldset:not(:has(.pick-{number}:checked)) :is(.line-{number}, .of-{number})" for number in range(lines)
    )
    return _RULES + (f"{hidden} {{ display: none; }}\n" if hidden else "")


# Choices work without script. With it, a fifth line takes the place of the one that was chosen first.
SCRIPT = f"""for (const box of document.querySelectorAll("fieldset")) {{
  const chosen = [...box.querySelectorAll("input:checked")];
  box.addEventListener("change", ({{target}}) => {{
    if (target.checked) chosen.push(target); else chosen.splice(chosen.indexOf(target), 1);
    while (chosen.length > {MOST}) chosen.shift().checked = false;
  }});
}}
"""

_RULES = f"""\
:root {{ color-scheme: light dark; {definitions(dark=False)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {definitions(dark=True)} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: {_INK}; background: {_PAPER};
  max-width: 66rem; margin: 0 auto; padding: 1.6rem 1rem; overflow-wrap: break-word; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }}
h2 {{ font-size: 1.2rem; margin: 0 0 .5rem; }}
h3 {{ font-size: 1rem; font-weight: 600; margin: 0; }}
dl {{ display: grid; grid-template-columns: minmax(6rem, max-content) minmax(0, 1fr); gap: .25rem 1rem;
  font-size: .93rem; margin: 0; }}
dt {{ color: {_QUIET}; }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
section, figure, footer {{ margin: 2.2rem 0 0; padding: 0; }}
p, ul {{ max-width: 52rem; }}
ul {{ padding-left: 1.2rem; margin: 0; }}
li {{ margin: .35rem 0; }}
figcaption, .note, footer {{ color: {_QUIET}; font-size: .9rem; }}
figcaption {{ max-width: 52rem; margin: 0 0 .6rem; }}
fieldset {{ border: 0; margin: 0; padding: 0; min-width: 0; }}
legend {{ font-size: .9rem; padding: 0; margin-bottom: .2rem; }}
label {{ display: inline-block; font-size: .9rem; padding: .25rem 1rem .25rem 0; overflow-wrap: anywhere; }}
input {{ width: 1rem; height: 1rem; margin: 0; vertical-align: -.15rem; }}
.key {{ width: 1.7rem; height: .7rem; margin: 0 .35rem; overflow: visible; }}
.panels {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 1.2rem;
  margin-top: .8rem; }}
.panel {{ min-width: 0; }}
.panel > svg {{ display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; }}
.panel > svg text {{ fill: {_INK}; }}
.wide {{ overflow-x: auto; margin: 1rem 0 1.8rem; }}
:focus-visible {{ outline: 2px solid {_INK}; outline-offset: 2px; }}
table {{ border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; width: 100%; }}
caption {{ text-align: left; font-weight: 600; padding: .3rem 0; }}
caption span {{ display: inline-block; position: sticky; left: 0; max-width: calc(100vw - 2rem); }}
th, td {{ text-align: right; padding: .28rem .55rem; border-bottom: 1px solid {_GRID}; white-space: nowrap; }}
thead th {{ font-weight: 600; color: {_QUIET}; white-space: normal; overflow-wrap: normal; vertical-align: bottom; }}
tr > :first-child {{ text-align: left; padding-left: 0; }}
tbody tr > th:first-child {{ font-weight: 400; white-space: normal; min-width: 8rem; max-width: 18rem;
  padding-left: 1.2em; position: sticky; left: 0; background: {_PAPER}; overflow-wrap: anywhere; }}
td small {{ color: {_QUIET}; font-size: .92em; }}
th i {{ position: absolute; left: 0; top: .75em; width: .7em; height: .7em; border-radius: 2px; }}
tr.best td:nth-child(2) {{ font-weight: 700; }}
code {{ border: 1px solid {_GRID}; padding: .05rem .3rem; border-radius: 3px; overflow-wrap: anywhere; }}
details {{ margin: .8rem 0; font-size: .93rem; }}
summary {{ font-weight: 600; cursor: pointer; padding: .2rem 0; }}
@media (max-width: 32rem) {{
  dl {{ grid-template-columns: minmax(0, 1fr); gap: 0; }}
  dd {{ margin-bottom: .45rem; }}
}}
@media print {{ .wide {{ overflow: visible; }} }}
"""
