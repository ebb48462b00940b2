"""The frame of a page that stands alone: style, sections, and a word to the browser that nothing is to be fetched."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is loaded and no script runs, whatever a completion may hold."""

_LIGHT = ("#4e79a7", "#e8793a", "#3f9b86", "#8a63b0", "#d8a92a", "#c8475c", "#5aa9cf", "#8b8f98")
_DARK = ("#6f9fd2", "#f09a5e", "#5cbfa8", "#ab88d3", "#e3c05a", "#e0697c", "#7cc4e6", "#9aa0ab")
"""Colours of series, apart in both schemes for most who see colours differently; by number."""

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--panel:#f6f7f9;--ink:#1d2127;--dim:#667080;--rule:#dfe3e8;--bad:#c2303f;
--warn:#b26a00;--good:#2a7d46;--plan:#3b6fb5;--lossy:#8a3fb0;LIGHT}
@media (prefers-color-scheme:dark){:root{--bg:#15181d;--panel:#1e2229;--ink:#e4e7ec;--dim:#98a2b3;--rule:#333a44;
--bad:#ff7b86;--warn:#f0b35a;--good:#6fcf8f;--plan:#7fb0ee;--lossy:#cf9bee;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1160px;margin:0 auto;padding:24px 24px 64px}
h1{font-size:26px;margin:0 0 2px}h2{font-size:20px;margin:40px 0 10px;padding-bottom:4px;
border-bottom:1px solid var(--rule)}
h3{font-size:15px;margin:18px 0 2px}
nav{margin:14px 0 0;display:flex;flex-wrap:wrap;gap:4px 16px;font-size:14px}a{color:var(--plan)}
p{margin:8px 0}.dim{color:var(--dim);overflow-wrap:anywhere}
.badge{font-size:13px;font-weight:600;vertical-align:4px;padding:2px 9px;border-radius:10px;background:var(--panel);
border:1px solid var(--rule)}.badge.finished{color:var(--good)}.badge.stopped{color:var(--bad)}
.badge.training{color:var(--plan)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:10px;margin-top:18px}
.card{background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:10px 12px;
border-top:3px solid var(--rule)}
.card b{display:block;font-size:12px;font-weight:600;color:var(--dim)}
.card span{display:block;font-size:20px;font-weight:600;white-space:nowrap;font-variant-numeric:tabular-nums}
.card i{display:block;font-style:normal;font-size:12px;color:var(--dim)}
.card.warn,.card.band-edge{border-top-color:var(--warn)}.card.band-danger{border-top-color:var(--bad)}
.card.band-safe{border-top-color:var(--good)}
.grid2{display:grid;grid-template-columns:repeat(auto-fill,minmax(440px,1fr));gap:6px 28px}figure{margin:0;
min-width:0}
svg{display:block;width:100%;height:auto;overflow:visible}
.grid{stroke:var(--rule);stroke-width:1}.tick{fill:var(--dim);font-size:11px;font-family:inherit}
.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}.dashed{stroke-dasharray:5 4}
.dot,.layer{fill:var(--c)}.layer{opacity:.88}.hint{fill:transparent}.hint:hover{fill:var(--ink);fill-opacity:.09}
.limit{stroke:var(--bad);stroke-width:1.6;stroke-dasharray:7 4}
.limit-text{fill:var(--bad);font-size:12px;font-weight:600;stroke:var(--bg);stroke-width:3px;paint-order:stroke}
.mark .drop{stroke:currentColor;stroke-width:1;opacity:.28}.mark{fill:currentColor}
.plan{color:var(--plan)}.failure{color:var(--bad)}.mark.alarm,.key.alarm{color:var(--warn)}
.lossy{color:var(--lossy)}
.legend{margin:2px 0 4px;font-size:12.5px;display:flex;flex-wrap:wrap;gap:2px 14px;color:var(--dim)}
.hint-text{margin:0;font-size:12.5px;color:var(--dim)}
.swatch.dashed{background:repeating-linear-gradient(90deg,var(--c) 0 4px,transparent 4px 7px)}
.swatch{display:inline-block;width:11px;height:11px;border-radius:2px;background:var(--c);margin-right:5px;
vertical-align:-1px}
.key{font-weight:600}
.note{border-left:4px solid var(--warn);padding:6px 12px;background:var(--panel);color:var(--ink);margin:6px 0}
p.failure{border-color:var(--bad);white-space:pre-wrap}p.lossy{border-color:var(--lossy)}
.scroll{overflow-x:auto;margin:8px 0}table{border-collapse:collapse;font-size:13.5px}
th,td{text-align:left;vertical-align:top;padding:4px 14px 4px 0;border-bottom:1px solid var(--rule)}
th{color:var(--dim);font-weight:600}.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td{overflow-wrap:anywhere;max-width:760px}table.wide{width:100%}
.wide td:nth-child(-n+2){white-space:pre-wrap;font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace}
.wide td:nth-child(2){width:60%}
summary{cursor:pointer;color:var(--plan);margin:8px 0}
@media print{details{display:block}}
"""


def document(title: str, heading: str, sections: Iterable[tuple[str, str]]) -> str:
    """Puts a page together."""
    listed = list(sections)
    named = [(name, _anchor(name)) for name, _ in listed if name]
    links = "".join(f'<a href="#{anchor}">{escape(name)}</a>' for name, anchor in named)
    body = "".join(
        f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{content}</section>' if name else content
        for name, content in listed
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>"
        f"<body><main>{heading}<nav>{links}</nav>{body}</main></body></html>\n"
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _style() -> str:
    light = "".join(f"--c{number}:{color};" for number, color in enumerate(_LIGHT))
    dark = "".join(f"--c{number}:{color};" for number, color in enumerate(_DARK))
    used = "".join(f".c{number}{{--c:var(--c{number})}}" for number in range(len(_LIGHT)))
    return _STYLE.replace("LIGHT", light).replace("DARK", dark) + used
