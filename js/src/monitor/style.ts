/** The looks, in the words and colors of gpumagic/display/palette.css. */

import { HUES } from './overview.js';

const KEYS = HUES.map((hue, n) => `.line-${n}{background:${hue}}`).join('');

export const CSS = `\
:host{--mine:var(--jp-brand-color1,#1976d2);--warn:var(--jp-warn-color1,#ef6c00);--good:var(--jp-success-color1,#388e3c);--bad:var(--jp-error-color1,#d32f2f);\
--text:var(--jp-ui-font-color1,var(--vscode-foreground,CanvasText));--paper:var(--jp-layout-color1,var(--vscode-editor-background,Canvas));--line:rgba(128,128,128,.28);--track:rgba(128,128,128,.16);\
--books:color-mix(in srgb,var(--mine) 46%,var(--paper));--others:color-mix(in srgb,var(--text) 46%,var(--paper));--unseen:color-mix(in srgb,var(--text) 27%,var(--paper));--driver:color-mix(in srgb,var(--text) 66%,var(--paper));\
display:block;color:var(--text);font:12px/1.45 var(--jp-ui-font-family,var(--vscode-font-family,system-ui,sans-serif));font-variant-numeric:tabular-nums;text-align:left}\
@media(prefers-color-scheme:dark){:host{--mine:var(--jp-brand-color1,#64b5f6);--warn:var(--jp-warn-color1,#ffb74d);--good:var(--jp-success-color1,#66bb6a);--bad:var(--jp-error-color1,#ef5350)}}\
:host([hidden]),[hidden]{display:none!important}\
*{box-sizing:border-box}\
.all{container-type:inline-size;padding:8px 12px 10px;position:relative}\
ul,dl,h2,p,pre{list-style:none;margin:0;padding:0}\
h2{font-size:12px;font-weight:600;margin:0 0 2px}\
b{font-weight:600}\
button,select{background:none;border:0;border-radius:3px;color:inherit;cursor:pointer;font:inherit;padding:0}\
:focus-visible{outline:2px solid var(--mine);outline-offset:1px}\
svg{fill:none;height:16px;stroke:currentColor;stroke-linecap:round;stroke-linejoin:round;stroke-width:1.4;width:16px;display:block;flex:none}\
.dim{opacity:.68}\
.bad{--tone:var(--bad)}.warn{--tone:var(--warn)}.good{--tone:var(--good)}\
.bad,.warn,.good{color:color-mix(in srgb,var(--tone) 72%,var(--text))}\
.top{align-items:flex-start;display:flex;font-size:11px;gap:0 10px;padding:0 0 6px}\
.top:not(:has(>:not(:empty,[hidden]))){display:none}\
.host{flex:1 1 0;min-width:0}\
.tools{display:flex;flex:none;gap:2px;margin:-2px -4px 0 auto}\
.tool{opacity:.6;padding:3px}.tool:hover{background:var(--track);opacity:1}.tool[aria-pressed=true]{background:var(--track);color:var(--mine);opacity:1}\
.summary{align-items:center;display:flex;gap:0 8px;justify-content:space-between;padding:0 0 5px}\
.order{align-items:center;flex:none;border-radius:3px;display:flex;font-size:11px;gap:3px;margin:0 -4px 0 auto;padding:1px 3px;position:relative}.order svg{opacity:.6}.order:hover{background:var(--track)}.order:focus-within{outline:2px solid var(--mine)}.order select{cursor:pointer;inset:0;opacity:0;position:absolute;width:100%}select option{background:var(--paper);color:var(--text)}\
.host-head{align-items:baseline;display:flex;flex-wrap:wrap;gap:0 8px;padding:0 0 4px}.host-head h2{margin:0;overflow-wrap:anywhere}.host-head span{font-size:11px}.host-section{border-top:1px solid var(--line);margin-top:10px;padding-top:7px}.host-section.silent .gpus{filter:grayscale(1)}\
.state:not(:empty)::before{background:var(--warn);border-radius:50%;content:"";display:inline-block;height:7px;margin-right:6px;width:7px}\
.all[data-kind=lost] .state::before{background:var(--bad)}\
.all[data-kind=standby] .state::before,.all[data-kind=connecting] .state::before{background:var(--unseen)}\
.all[data-kind=lost] .gpus{filter:grayscale(1)}\
.gpus{display:grid;gap:8px;grid-template-columns:repeat(auto-fit,minmax(min(100%,252px),1fr));align-items:start}\
.gpus.lines{gap:0 24px;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr))}\
.card{border:1px solid var(--line);border-radius:6px;container-type:inline-size;min-width:0;padding:5px 9px 6px}\
.head{align-items:center;cursor:pointer;display:flex;gap:6px;min-width:0}\
.open{align-items:center;display:flex;flex:none;margin-left:-5px;padding-right:2px;white-space:nowrap}\
.open svg{opacity:.6;transition:transform .12s}\
.open[aria-expanded=true] svg{transform:rotate(90deg)}\
.head:hover svg{opacity:1}\
.own{color:color-mix(in srgb,var(--mine) 80%,var(--text))}\
.limit{display:none}\
.name{flex:1 1 0;min-width:0;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}\
.heat{flex:none;margin-left:auto;white-space:nowrap}\
.badges{display:flex;flex-wrap:wrap;gap:4px;min-width:0}\
.badge{border:1px solid currentColor;border-radius:3px;font-size:10.5px;letter-spacing:.02em;line-height:15px;max-width:100%;overflow:hidden;padding:0 4px;text-overflow:ellipsis;white-space:nowrap}\
.badge.bad,.badge.warn{background:color-mix(in srgb,var(--tone) 12%,transparent);border-color:color-mix(in srgb,var(--tone) 70%,transparent);color:inherit}\
.head .badge{opacity:.75}\
.body>.badges{padding:4px 0 0}\
.charts{display:grid;gap:4px;padding-top:3px}\
.chart{align-items:center;display:grid;gap:8px;grid-template-columns:92px 1fr;min-width:0}\
.cap{display:grid;line-height:14px;white-space:nowrap}\
.cap .dim{font-size:11px}\
.axis{display:flex;font-size:10px;justify-content:space-between;line-height:11px;margin:-4px 0 0 100px}\
canvas{border-radius:2px;display:block;height:28px;width:100%}\
.bar{background:var(--track);border-radius:3px;contain:strict;display:grid;height:8px;min-width:0;overflow:hidden}\
.bar .mine,.dot.mine,.probe .mine{background:var(--mine)}\
.bar .books,.dot.books,.probe .books{background:var(--books)}\
.bar .others,.dot.others,.probe .others{background:var(--others)}\
.bar .left,.dot.left,.probe .left{background:var(--warn)}\
.bar .unseen,.dot.unseen,.probe .unseen{background:var(--unseen)}\
.bar .driver,.dot.driver,.probe .driver{background:var(--driver)}\
.bar .busy,.probe .busy{background:var(--good)}\
.probe .mark{background:var(--mine)}.probe .rule{background:rgba(128,128,128,.5)}\
.processes{padding-top:3px}\
.process{align-items:flex-start;line-height:17px;position:relative;display:flex;gap:6px;min-width:0}\
.dot{border-radius:2px;flex:none;height:9px;width:9px}.process .dot{margin-top:4px}\
.text{column-gap:8px;display:flex;flex:1 1 0;flex-wrap:wrap;min-width:0}\
.who,.note{max-width:100%;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}\
.who.mine{font-weight:600}\
.note{font-size:11px}\
.size,.number{flex:none;text-align:right;white-space:nowrap}\
.acts{background:var(--paper);border-radius:3px;box-shadow:-4px 0 4px var(--paper);display:flex;flex:none;opacity:0;position:absolute;right:60px;top:0}\
.acts button{padding:1px 2px}\
.process:hover .acts,.acts:focus-within{opacity:1}.trouble .acts{box-shadow:none;margin:0 -4px 0 -4px;opacity:1;position:static}\
@media(hover:none){.acts{box-shadow:none;margin:0 -4px 0 -4px;opacity:1;position:static}}\
.acts button:hover{background:var(--track)}\
.more{font-size:11px;padding:0 0 0 15px}.more:hover{text-decoration:underline}\
.held-here{padding-top:3px}.held-here .open{font-size:11px;margin-left:-4px}.holdings{padding:1px 0 2px 12px}.held-here>div>.note{padding-left:12px}\
.holding{align-items:start;display:grid;gap:0 8px;grid-template-columns:minmax(0,1fr) auto;padding:2px 0}.holding .title{line-height:18px;margin:0;max-width:100%;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}.holding .note,.holding .bar{grid-column:1/-1}.holding .bar{height:3px}\
.slices{padding-top:6px}\
.slice{align-items:center;display:grid;gap:8px;grid-template-columns:auto 1fr auto;padding-top:2px}\
.pace .bar{transition:grid-template-columns .2s}\
.paces{align-items:center;display:grid;gap:2px 8px;grid-template-columns:auto 1fr auto}.paces .pace{display:contents}\
.slice+div .processes{padding-top:2px}\
.facts{border-top:1px solid var(--line);display:grid;gap:1px 24px;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));margin-top:8px;padding-top:6px}\
.facts div{display:flex;gap:10px;min-width:0}\
dt{flex:none;width:84px}\
dd{margin:0;min-width:0;overflow-wrap:anywhere}\
.line .open b:not(.own){font-weight:400}\
.line{border-top:1px solid var(--line);min-width:0}\
.line .head{display:grid;font-size:11.5px;gap:5px;grid-template-columns:60px 3px minmax(10px,1fr) 34px minmax(14px,1.5fr) 50px 26px;min-height:23px}\
.line:has([aria-expanded=true]){grid-column:1/-1}\
.line .mark{font-weight:700;text-align:center}\
.line .body{padding:0 0 8px 11px}\
.folds{padding-top:6px}.fold{border-top:1px solid var(--line);min-width:0}.fold .head{min-height:23px}.fold .head>.dim{flex:none;margin-left:auto}.fold .open{flex:0 1 auto;min-width:0}.fold .open b{overflow:hidden;text-overflow:ellipsis}.fold .gpus{padding-left:11px}\
.lost .body>:not(.badges){filter:grayscale(1)}\
.overview{padding-bottom:10px}.overs{display:grid;gap:10px 20px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}\
.over{min-width:0}.over-head,.span{display:flex;justify-content:space-between}.over-head .dim{font-size:11px}.span{font-size:10px;line-height:13px}.over canvas{height:110px}\
.keys{display:flex;flex-wrap:wrap;gap:2px 14px;padding-bottom:8px}.keys li{align-items:center;display:flex;gap:5px}${KEYS}\
.scale{align-items:center;display:flex;font-size:11px;gap:6px;padding-bottom:6px}.scale i{background:linear-gradient(90deg,transparent,var(--good));border-radius:2px;height:8px;width:80px}\
.legend{display:flex;flex-wrap:wrap;font-size:11px;gap:0 12px;padding-top:8px}\
.legend span{align-items:center;display:flex;gap:5px}\
.problems{padding-bottom:6px}\
.problem{border-left:3px solid var(--warn);margin:0 0 6px;overflow-wrap:anywhere;padding-left:10px}\
code{background:var(--track);border-radius:3px;font:11px var(--jp-code-font-family,ui-monospace,monospace);padding:0 3px;display:inline-block;max-width:100%}\
.spoken{clip-path:inset(50%);height:1px;overflow:hidden;position:absolute;width:1px}\
.doctor{padding-bottom:10px}\
.check{display:grid;gap:0 8px;grid-template-columns:12px 1fr;overflow-wrap:anywhere;padding:3px 0}\
.check span:last-of-type{grid-column:2}\
.check>span:first-child{text-align:center}\
.cure{display:block;font-weight:600}\
.doctor p{padding-top:8px}\
.again{border:1px solid var(--line);margin-top:6px;padding:3px 10px}\
.again:hover{background:var(--track)}\
.held,.results{padding-top:10px}.held:has(+.gpus){padding:2px 0 8px}\
.results li{border-top:1px solid var(--line);padding:3px 0}\
summary{cursor:pointer}summary>span{margin-right:8px}.title{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:11.5px}.verdict{display:block;overflow:hidden;padding-left:14px;text-overflow:ellipsis;white-space:nowrap}[open] .verdict{display:none}\
.result{overflow:auto;padding:4px 0 6px}\
pre{font:11.5px/1.4 var(--jp-code-font-family,ui-monospace,monospace)}\
.bones{padding:4px 0}\
.tip{background:var(--jp-layout-color2,Canvas);border:1px solid var(--line);border-radius:4px;box-shadow:0 2px 8px rgba(0,0,0,.25);font-size:11px;left:0;max-width:calc(100% - 8px);padding:3px 7px;pointer-events:none;position:absolute;top:0;z-index:9}\
.part{display:inline-block;max-width:100%;overflow:hidden;text-overflow:ellipsis;vertical-align:bottom;white-space:nowrap}\
@container(max-width:340px){.line .head{grid-template-columns:56px 3px minmax(10px,1fr) 34px minmax(14px,1.3fr) 50px}.line .head>:last-child{display:none}}\
@container(max-width:235px){.chart{grid-template-columns:84px 1fr}.axis{margin-left:92px}.cap b{font-size:11px}}\
@container(min-width:460px){.note{flex:none}.check{grid-template-columns:12px minmax(100px,190px) 1fr}.check span:last-of-type{grid-column:3}.limit{display:inline}}\
@container(min-width:640px){.processes{display:grid;gap:0 18px;grid-template-columns:1fr 1fr}}\
@media(prefers-reduced-motion:reduce){*{transition:none!important}}\
@media(forced-colors:active){:host{--mine:Highlight;--others:CanvasText;--warn:CanvasText;--good:Highlight;--bad:CanvasText;--line:GrayText;--track:Canvas;--driver:GrayText}\
.bar,.dot,.probe,.state::before{forced-color-adjust:none}.bar{outline:1px solid CanvasText}.dim,.head .badge,.acts{opacity:1}}\
.probe{height:0;position:absolute;visibility:hidden;width:0}\
`;
