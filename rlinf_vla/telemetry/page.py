"""Build a report's HTML: one self-contained page, light or dark as the reader's system is set."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from string import Template


def page(title: str, body: str) -> str:
    return _PAGE.substitute(title=escape(title), style=_STYLE, body=body)


def section(heading: str, body: str, remark: str = "") -> str:
    return f"<section><h2>{escape(heading)}</h2>{paragraph(remark) if remark else ''}{body}</section>\n"


def panel(title: str, remark: str, drawn: str, narrow: str = "", legend: str = "") -> str:
    """Return a chart on a card; given ``narrow``, full-width, with ``narrow`` shown on phones."""
    if narrow:
        drawn = f'<div class="wide">{drawn}</div><div class="narrow">{narrow}</div>'
    heading = f'<div class="title"><h3>{escape(title)}</h3><span>{escape(remark)}</span></div>'
    legend = f'<div class="legend">{legend}</div>' if legend else ""
    return f'<figure class="card{" whole" if narrow else ""}">{heading}{drawn}{legend}</figure>'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def collapsible_table(heading: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a two-column table, collapsed until the reader opens it."""
    cells = "".join(f"<tr><th scope=row>{escape(key)}</th><td>{escape(value)}</td></tr>\n" for key, value in rows)
    return f"<details><summary>{escape(heading)}</summary><div class=scroll><table class=pairs>{cells}</table></div></details>\n"


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body</main>
</body>
</html>
""")

_STYLE = """
:root {
  --paper: #faf9f6; --card: #ffffff; --ink: #1d1c1a; --muted: #6f6b64; --line: #e3dfd7;
  --accent: #0b7a6f; --before: #a39c90;
  --series-0: #0b7a6f; --series-1: #d98a2b; --series-2: #5b6abf; --series-3: #b4472f;
  --series-4: #79a83b; --series-5: #a0559b; --series-6: #3f9fc4; --series-7: #a39c90;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #151513; --card: #1d1d1a; --ink: #eeebe4; --muted: #9d978b; --line: #34322d;
    --accent: #3fc6b4; --before: #7d776c;
    --series-0: #3fc6b4; --series-1: #e9a552; --series-2: #8f9cf0; --series-3: #ec8468;
    --series-4: #a5cf6b; --series-5: #cf8bca; --series-6: #6cc4e6; --series-7: #7d776c;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 60rem; margin: 0 auto; padding: clamp(1.25rem, 4vw, 3.5rem) clamp(1rem, 4vw, 2rem) 4rem; }
header { margin-bottom: 2rem; }
h1 { font-size: clamp(1.7rem, 5vw, 2.5rem); line-height: 1.15; letter-spacing: -0.02em; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; letter-spacing: -0.01em; margin: 3rem 0 .25rem; }
h3 { font-size: .85rem; font-weight: 600; margin: 0; }
p { margin: .25rem 0 1rem; max-width: 44rem; }
section > p, header p, figcaption, .remark { color: var(--muted); }
header p { margin: 0; }
.kind { color: var(--accent); font-size: .8rem; font-weight: 600; letter-spacing: .09em; text-transform: uppercase; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: clamp(1rem, 3vw, 1.6rem); }
.hero { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem clamp(1rem, 4vw, 2.6rem); }
.hero .number { font-size: clamp(3rem, 11vw, 5.2rem); font-weight: 650; letter-spacing: -.045em; line-height: 1; }
.hero .number small { font-size: .45em; font-weight: 500; letter-spacing: 0; margin-left: .12em; }
.hero .after .number { color: var(--accent); }
.hero .before .number { color: var(--before); }
.hero .arrow { font-size: clamp(1.5rem, 5vw, 2.4rem); color: var(--before); }
.hero span { display: block; font-size: .85rem; color: var(--muted); }
.verdict { margin: 1.2rem 0 0; font-size: 1.05rem; }
.intervals { margin-top: 1.6rem; display: grid; grid-template-columns: max-content 1fr max-content; gap: .3rem .9rem; align-items: center;
  font-size: .85rem; }
.intervals .mode { grid-column: 1 / -1; font-weight: 600; margin-top: .5rem; }
.intervals .rail { position: relative; height: 1.1rem; background: linear-gradient(var(--line), var(--line)) center / 100% 1px no-repeat; }
.intervals .rail i { position: absolute; top: 25%; height: 50%; border-radius: 99px; background: currentColor; opacity: .3;
  min-width: 2px; }
.intervals .rail b { position: absolute; top: 50%; width: .7rem; height: .7rem; margin: -.35rem 0 0 -.35rem; border-radius: 50%;
  background: currentColor; }
.intervals .after { color: var(--accent); }
.intervals .before { color: var(--before); }
.intervals .value { text-align: right; }
.intervals .value em { font-style: normal; color: var(--muted); }
.intervals .scale { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); color: var(--muted); font-size: .75rem;
  grid-column: 2; }
.intervals .scale :nth-child(2) { text-align: center; }
.intervals .scale :nth-child(3) { text-align: right; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: 1rem; margin-top: 1rem; }
.panels .whole { grid-column: 1 / -1; }
figure { margin: 0; }
figure.card { padding-bottom: .9rem; }
figure .title { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; margin-bottom: .5rem; }
figure .title span { color: var(--muted); font-size: .85rem; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: inherit !important; }
.narrow { display: none; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .85rem; color: var(--muted); margin-top: .8rem; }
.legend i { display: inline-block; width: .7rem; height: .7rem; border-radius: 3px; margin-right: .45rem; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; margin-top: 1rem; max-width: 44rem; }
video { width: 100%; border-radius: 8px; display: block; background: var(--line); }
figcaption { font-size: .85rem; margin-top: .5rem; overflow-wrap: anywhere; }
figcaption b { color: var(--ink); }
.scroll { overflow-x: auto; }
section > .scroll { margin-top: 1.2rem; }
.card + p, .scroll + p, details + p { margin-top: 1rem; }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
th, td { text-align: left; padding: .35rem 1.2rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; font-weight: 400; }
thead th { color: var(--muted); font-size: .8rem; }
.total th, .total td { font-weight: 600; }
.heat td { text-align: center; padding: .35rem .6rem; border: 1px solid var(--paper); }
.pairs th { color: var(--muted); white-space: nowrap; width: 1%; }
.pairs td { overflow-wrap: anywhere; font-family: ui-monospace, "SF Mono", Menlo, monospace; font-size: .82rem; }
details { margin-top: .75rem; border-top: 1px solid var(--line); padding-top: .75rem; }
summary { cursor: pointer; font-weight: 600; }
details .scroll { margin-top: .5rem; }
@media (max-width: 40rem) {
  .hero { display: grid; grid-template-columns: 1fr 1fr; align-items: start; }
  .hero .arrow { display: none; }
  .hero .number { font-size: clamp(2.2rem, 13vw, 4rem); }
  .wide { display: none; }
  .narrow { display: block; }
  .pairs th { white-space: normal; overflow-wrap: anywhere; width: 45%; }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
"""
