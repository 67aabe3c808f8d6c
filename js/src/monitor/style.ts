/** The style sheet of the monitor, in the colors of gpumagic/display/palette.css. */

export const CSS = `\
:host{--own:var(--jp-brand-color1,#1976d2);--warn:var(--jp-warn-color1,#ef6c00);--good:var(--jp-success-color1,#388e3c);--bad:var(--jp-error-color1,#d32f2f);\
--text:var(--jp-ui-font-color1,var(--vscode-foreground,CanvasText));--paper:var(--jp-layout-color1,var(--vscode-editor-background,Canvas));--line:rgba(128,128,128,.28);--track:rgba(128,128,128,.16);--mono:var(--jp-code-font-family,ui-monospace,monospace);\
--ownOther:color-mix(in srgb,var(--own) 46%,var(--paper));--other:color-mix(in srgb,var(--text) 52%,var(--paper));--system:color-mix(in srgb,var(--text) 40%,var(--paper));\
display:block;color:var(--text);font:12px/1.45 var(--jp-ui-font-family,var(--vscode-font-family,system-ui,sans-serif));font-variant-numeric:tabular-nums;text-align:left}\
@media(prefers-color-scheme:dark){:host{--own:var(--jp-brand-color1,#64b5f6);--warn:var(--jp-warn-color1,#ffb74d);--good:var(--jp-success-color1,#66bb6a);--bad:var(--jp-error-color1,#ef5350)}}\
[hidden]{display:none!important}\
*{box-sizing:border-box}\
.all{container-type:inline-size;padding:8px 12px 10px;position:relative}\
ul,dl,h2,p,pre{list-style:none;margin:0;padding:0}\
h2{font-size:12px;font-weight:600;margin:0 0 2px}\
b{font-weight:600}\
button{background:none;border:0;border-radius:3px;color:inherit;cursor:pointer;font:inherit;padding:0}\
:focus-visible{outline:2px solid var(--own);outline-offset:1px}\
svg{fill:none;height:16px;stroke:currentColor;stroke-linecap:round;stroke-linejoin:round;stroke-width:1.4;width:16px;display:block;flex:none}\
.dim{opacity:.68}\
.bad{--tone:var(--bad)}.warn{--tone:var(--warn)}.good{--tone:var(--good)}\
.bad,.warn,.good{color:color-mix(in srgb,var(--tone) 72%,var(--text))}\
.tool{border-radius:3px;opacity:.6;padding:3px 5px;position:absolute;right:8px;top:6px}.tool:hover{background:var(--track);opacity:1}\
.machine+.machine{border-top:1px solid var(--line);margin-top:10px;padding-top:7px}\
.machine-head{align-items:baseline;display:flex;flex-wrap:wrap;font-size:11px;gap:2px 10px;overflow-wrap:anywhere;padding:0 0 6px}.machine-head h2{margin:0}\
.tool~* .machine:first-child .machine-head>:first-child{max-width:calc(100% - 24px)}.load{display:flex;flex:1 0 100%;gap:12px}.meter{align-items:center;display:flex;flex:0 1 auto;font-size:11px;gap:4px;white-space:nowrap}.meter .bar{height:6px;width:18px}.meter .busy{color:var(--other)}.meter.warn .busy{color:var(--warn)}\
.summary{padding:0 0 5px}\
.state{font-size:11px;margin-right:24px}.state:not(:empty)::before{background:var(--warn);border-radius:50%;content:"";display:inline-block;height:7px;margin-right:6px;width:7px}\
[data-kind=lost] .state::before{background:var(--bad)}\
[data-kind=standby] .state::before,[data-kind=connecting] .state::before{background:var(--system)}\
[data-kind=lost] .gpus,.silent .gpus,.lost .body{filter:grayscale(1)}\
.gpus{align-items:start;display:grid;gap:0 24px;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr))}\
.gpus.few{gap:0 8px;grid-template-columns:repeat(auto-fit,minmax(min(100%,252px),1fr))}\
.gpu{border-top:1px solid var(--line);container-type:inline-size;min-width:0}\
.opened{padding-bottom:6px}\
.gpus:not(.few) .opened{grid-column:1/-1}\
.head{column-gap:5px;cursor:pointer;display:flex;flex-wrap:wrap;font-size:11.5px;height:23px;line-height:23px;overflow:hidden}\
.head>*{flex:none;text-align:right;white-space:nowrap}.head .bar{flex:1 1 20px;margin:7.5px 0;max-width:140px}\
.head .model,.head .whose{max-width:130px;text-align:left}.head .whose{flex:3 1 64px;max-width:none}\
.used{min-width:61px}.percent{min-width:33px}.heat{min-width:23px}.power{min-width:36px}\
.open{align-items:center;display:flex;flex:none;margin-left:-5px;padding-right:2px;white-space:nowrap}\
.open svg{opacity:.6}\
.open[aria-expanded=true] svg{transform:rotate(90deg)}.heads{overflow:hidden;text-overflow:ellipsis}\
.head:hover svg{opacity:1}\
.gpu:not(.opened) b:not(.here){font-weight:400}\
.here{color:color-mix(in srgb,var(--own) 80%,var(--text))}\
.model,.whose,.who,.note,.title,.verdict,.part,.badge{max-width:100%;min-width:0;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}\
.badges{display:flex;flex-wrap:wrap;gap:4px;min-width:0}\
.badge{border:1px solid currentColor;border-radius:3px;font-size:10.5px;line-height:15px;padding:0 4px}\
.badge.bad,.badge.warn{background:color-mix(in srgb,var(--tone) 12%,transparent);border-color:color-mix(in srgb,var(--tone) 70%,transparent);color:inherit}\
.gpu>.badges{padding:0 0 4px}.gpu>.badges .badge{white-space:normal}.head .open{height:100%}.vitals{font-size:11px;line-height:15px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}\
.charts{display:grid;gap:3px;padding-top:2px}\
.chart{align-items:center;display:grid;gap:8px;grid-template-columns:118px 1fr;min-width:0}\
.cap .dim{overflow:hidden;text-overflow:ellipsis}.cap{display:flex;gap:3px;justify-content:space-between;font-size:11px;white-space:nowrap}\
.axis{display:grid;font-size:10px;gap:8px;grid-template-columns:118px 1fr auto;line-height:11px;margin:-3px 0 0}\
canvas{border-radius:2px;display:block;height:22px;width:100%}\
.bar{background:var(--track);border-radius:3px;contain:strict;display:grid;height:8px;min-width:0;overflow:hidden}\
.bar i,.dot{background:currentColor}.bar .orphan,.dot.orphan,.bar .system,.dot.system{background:repeating-linear-gradient(135deg,currentColor 0 1.5px,transparent 1.5px 3.5px)}\
i.own,i.mark{color:var(--own)}i.ownOther,i.orphan{color:var(--ownOther)}i.other{color:var(--other)}i.system{color:var(--system)}i.busy{color:var(--good)}i.rule{color:rgba(128,128,128,.5)}\
.variables{padding-top:3px}\
.notebooks{display:grid;grid-template-columns:auto minmax(0,1fr) repeat(3,auto);max-width:640px;padding-bottom:7px}.notebooks ul{display:contents}\
.process{display:grid;grid-column:1/-1;grid-template-columns:subgrid;line-height:17px;position:relative}.process .note,.notebooks .more{grid-column:2/-1}\
.dot{border-radius:2px;flex:none;height:9px;width:9px}.process .dot{margin:4px 6px 0 0}.process .size:not(:empty){padding-left:10px}.titles{font-size:11px}.titles h2{grid-column:1/3;margin:0}.bare .cost{display:none}\
.who.own{font-weight:600}\
.note,.more,.variables .open{font-size:11px}\
.size,.number{flex:none;text-align:right;white-space:nowrap}\
.more{text-align:left}.more:hover,.note .more{text-decoration:underline}\
.variables .open{margin-left:-4px;max-width:100%}.rows{padding:1px 0 2px 12px}.variables>div>.note{padding-left:12px}\
.variable{align-items:start;display:grid;gap:0 8px;grid-template-columns:minmax(0,1fr) auto;padding:2px 0}.variable .title{line-height:18px}.variable .note,.variable .bar{grid-column:1/-1}.variable .bar{height:3px}\
.slices{padding-top:6px}\
.slice,.paces{align-items:center;display:grid;gap:2px 8px;grid-template-columns:auto 1fr auto}.slice{padding-top:2px}.paces .pace{display:contents}\
.facts{display:grid;gap:1px 24px;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));padding-top:3px}\
.facts div{display:flex;gap:10px;min-width:0}\
dt{flex:none;width:108px}\
dd{margin:0;min-width:0;overflow-wrap:anywhere}\
.problems{padding-bottom:6px}\
.problem{border-left:3px solid var(--warn);margin:0 0 6px;overflow-wrap:anywhere;padding-left:10px}.cause{font-weight:600}\
code{background:var(--track);border-radius:3px;display:inline-block;font:11px var(--mono);max-width:100%;padding:0 3px}\
.spoken{clip-path:inset(50%);height:1px;overflow:hidden;position:absolute;width:1px}\
.results{padding-top:10px}\
.results li{border-top:1px solid var(--line);padding:3px 0}\
summary{cursor:pointer}summary>span{margin-right:8px}.title{font-family:var(--mono);font-size:11.5px}.verdict{display:block;padding-left:14px}[open] .verdict{display:none}\
.result{overflow:auto;padding:4px 0 6px}.result pre{padding-top:4px}\
pre{font:11.5px/1.4 var(--mono)}\
.tip{background:var(--jp-layout-color2,Canvas);border:1px solid var(--line);border-radius:4px;box-shadow:0 2px 8px rgba(0,0,0,.25);font-size:11px;left:0;max-width:calc(100% - 8px);padding:3px 7px;pointer-events:none;position:absolute;top:0;z-index:9}\
.part{display:inline-block;vertical-align:bottom}\
@container(min-width:300px){.meter .bar{width:40px}}\
@container(max-width:290px){.process .size:not(:empty){padding-left:6px}.kind{font-size:0;line-height:0}.head .model{max-width:46px}}\
@media(forced-colors:active){:host{--own:Highlight;--other:CanvasText;--warn:CanvasText;--good:Highlight;--bad:CanvasText;--line:GrayText;--track:Canvas;--system:GrayText}\
.bar,.dot,.probe,.state::before{forced-color-adjust:none}.bar{outline:1px solid CanvasText}.dim{opacity:1}}\
.probe{height:0;position:absolute;visibility:hidden;width:0}\
`;
