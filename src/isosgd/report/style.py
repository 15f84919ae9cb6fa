"""The style sheet of reports: quiet, readable on paper, on a phone, by day and by night; nothing is fetched."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --card: #f6f7f9; --ink: #1b2430; --soft: #5a6675; --rule: #dde2e8; --accent: #0b63a5;
  --good: #1a7f4b; --good-card: #ecf7f1; --wait: #a8640a; --wait-card: #fdf5e6; --bad: #b3372b; --bad-card: #fcefed;
  --a: #0b63a5; --b: #d9641a; --c: #1f8a70; --d: #9b4f96; --e: #b58a00; --f: #5b6fd6; --grey: #7d8896;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12171e; --card: #1b222c; --ink: #e4e9ef; --soft: #9aa6b4; --rule: #323c49; --accent: #6db4f0;
    --good: #5fcb93; --good-card: #14271e; --wait: #e8b25a; --wait-card: #2a2214; --bad: #f0897e; --bad-card: #2d1a18;
    --a: #5eaef2; --b: #f29455; --c: #56c4a8; --d: #cf8fca; --e: #dcb845; --f: #98a6f5; --grey: #8b97a6;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55
    -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1000px; margin: 0 auto; padding: 40px 24px 64px; }
.kicker { margin: 0; color: var(--soft); font-size: 13px; letter-spacing: .06em; text-transform: uppercase; }
h1 { margin: 4px 0 10px; font-size: 31px; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
.lead { margin: 0 0 26px; max-width: 46em; color: var(--soft); font-size: 17px; }
h2 {
  margin: 52px 0 4px; padding-top: 20px; border-top: 1px solid var(--rule); font-size: 21px; letter-spacing: -.01em;
}
h3 { margin: 0 0 8px; font-size: 15px; line-height: 1.35; }
h2 + p { margin: 0 0 20px; max-width: 46em; color: var(--soft); }
.verdict { border-left: 5px solid var(--wait); border-radius: 6px; padding: 18px 22px; background: var(--wait-card); }
.verdict.good { border-color: var(--good); background: var(--good-card); }
.verdict.bad { border-color: var(--bad); background: var(--bad-card); }
.verdict strong { display: block; color: var(--wait); font-size: 23px; line-height: 1.25; letter-spacing: -.01em; }
.verdict.good strong { color: var(--good); }
.verdict.bad strong { color: var(--bad); }
.verdict ul { margin: 8px 0 0; padding-left: 20px; }
.verdict li { margin: 3px 0; overflow-wrap: anywhere; }
.verdict .fix { margin: 10px 0 0; }
.verdict pre { margin-top: 6px; background: var(--paper); }
.remarks { margin-top: 12px; color: var(--soft); font-size: 14px; line-height: 1.45; }
.remarks ul { margin-top: 2px; }
.figures > .scroll { margin: 0; min-width: 0; }
.figures + .figures { margin-top: 34px; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin: 18px 0 0; padding: 0;
}
.tiles > div { border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 2px 0 0; font-size: 24px; line-height: 1.2; font-weight: 600; letter-spacing: -.01em; }
.tiles small {
  display: block; margin-top: 3px; color: var(--soft); font-size: 12px; font-weight: 400; line-height: 1.35;
  letter-spacing: 0;
}
.figures {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 34px 36px;
  align-items: start;
}
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure.wide svg + svg { display: none; }
figcaption { margin-top: 6px; color: var(--soft); font-size: 14px; line-height: 1.45; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font-family: inherit; font-size: 12px; }
svg .tick { fill: var(--soft); font-size: 11px; }
svg .label, svg .legend { fill: var(--soft); }
svg .light { fill: var(--paper); }
.axis { stroke: var(--grey); fill: none; }
.grid { stroke: var(--rule); fill: none; }
.line, .rod { fill: none; stroke: var(--k); stroke-width: 2; stroke-linejoin: round; }
.line.thin { stroke-width: 1.1; stroke-opacity: .85; }
.line.dashed { stroke-dasharray: 5 4; stroke-width: 1.4; }
.rod { stroke-width: 1.6; stroke-opacity: .42; }
.dot { fill: var(--k); fill-opacity: .75; }
.band { fill: var(--k); fill-opacity: .26; stroke: none; }
.band.grey { fill-opacity: .18; }
.band.faint { fill-opacity: .13; }
.bar { fill: var(--k); fill-opacity: .8; }
.bar.overlaid { fill-opacity: .5; }
.cell { fill: var(--a); }
.a { --k: var(--a); } .b { --k: var(--b); } .c { --k: var(--c); } .d { --k: var(--d); } .e { --k: var(--e); }
.f { --k: var(--f); } .grey { --k: var(--grey); }
.scroll { overflow-x: auto; margin: 18px 0 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
caption { text-align: left; color: var(--soft); padding-bottom: 6px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 500; }
table.facts td { white-space: normal; overflow-wrap: anywhere; text-align: left; vertical-align: top; }
table.facts td:first-child { color: var(--soft); width: 12em; padding-right: 18px; overflow-wrap: normal; }
pre {
  margin: 10px 0 0; padding: 14px 16px; border-radius: 8px; background: var(--card);
  font-size: 13.5px; line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere;
}
ul.notes { padding-left: 20px; margin: 0; }
ul.notes li { overflow-wrap: anywhere; }
footer { margin-top: 48px; padding-top: 16px; border-top: 1px solid var(--rule); color: var(--soft); font-size: 13px; }
@media (max-width: 560px) {
  figure.wide svg { display: none; }
  figure.wide svg + svg { display: block; }
  main { padding: 24px 16px 44px; }
  h1 { font-size: 25px; }
  .tiles { grid-template-columns: repeat(2, 1fr); }
  .tiles dd { font-size: 21px; }
  table.facts td:first-child { width: 8em; }
}
@media print {
  :root {
    color-scheme: light;
    --paper: #fff; --card: #f4f5f7; --ink: #000; --soft: #444; --rule: #ccc; --accent: #0b63a5;
    --good: #1a7f4b; --good-card: #fff; --wait: #a8640a; --wait-card: #fff; --bad: #b3372b; --bad-card: #fff;
    --a: #0b63a5; --b: #d9641a; --c: #1f8a70; --d: #9b4f96; --e: #b58a00; --f: #5b6fd6; --grey: #6d7886;
  }
  @page { margin: 16mm 14mm; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  h2 { break-after: avoid; margin-top: 30px; }
  figure, .tiles > div, tr, .verdict { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; gap: 22px 26px; }
  .figures > .scroll { grid-column: 1 / -1; }
  .tiles { grid-template-columns: repeat(4, 1fr); }
  .tiles dd { font-size: 15pt; }
  .scroll { overflow: visible; }
  th, td { padding-right: 8px; }
}
"""
