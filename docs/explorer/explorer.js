"use strict";
// The explorer's page: it makes controls, hands what is chosen to Python, and shows what comes back. Every rule and every
// figure is Python's, from the course's own modules; python.js starts it. This file is no module, so that it can also say
// why a page that is opened as a file cannot start.

const HERE = new URL(".", document.currentScript.src).href;
const WAIT_MS = 150; // how long nothing has to change before what to change next is worked out
const OF_A_RUN = ["stack", "timeline", "phase", "code", "rows"];

const at = (id) => document.getElementById(id);

function made(tag, attributes = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

function whyNot() {
  if (location.protocol === "file:") {
    return "A page that was opened as a file cannot load its parts. Serve the folder instead: run " +
      "“python3 -m http.server” in it, then open http://localhost:8000/ here.";
  }
  if (typeof WebAssembly !== "object") {
    return "This page runs Python in your browser and needs WebAssembly, which this browser does not have or has switched off. " +
      "Any current Firefox, Chrome, Edge or Safari has it.";
  }
  return "";
}

function fail(words) {
  at("loading").textContent = words;
  at("verdict").dataset.state = "refused";
}

class Page {
  constructor(python, formulas, startSearcher) {
    this.python = python;
    this.newSearcher = startSearcher;
    this.formulas = formulas;
    this.controls = JSON.parse(formulas.controls());
    this.first = Object.fromEntries(this.controls.map((control) => [control.name, control.first]));
    this.shows = {}; // by control: what sets it to a text
    this.asked = 0;
    this.searching = false;
    at("controls").append(...this.madeGroups());
    this.listen();
    this.follow(location.hash);
    at("loading").hidden = true;
    at("words").hidden = false;
    at("page").classList.add("started");
    this.redraw();
  }

  madeGroups() {
    const names = [...new Set(this.controls.map(({ group }) => group))], wide = matchMedia("(min-width: 56.25rem)").matches;
    return names.map((name, place) => {
      const members = this.controls.filter(({ group }) => group === name).map((control) => this.madeControl(control));
      const open = place < (wide ? 3 : 1) ? { open: "" } : {}; // on a phone the one that is used most
      return made("details", open, made("summary", {}, name), made("div", {}, ...members));
    });
  }

  madeControl(control) {
    const id = `choice-${control.name}`;
    const label = made("label", { for: id }, control.label);
    const input = control.kind === "steps" ? this.madeSlider(control, id, label) : this.madeSelect(control, id);
    return made("div", { class: "control" }, label, input);
  }

  madeSelect(control, id) {
    const select = made("select", { id, name: control.name });
    select.append(...control.options.map(([text, shown]) => made("option", { value: text }, shown)));
    this.shows[control.name] = (text) => { select.value = text; };
    select.addEventListener("input", (event) => this.choose(control.name, select.value, event));
    return select;
  }

  madeSlider(control, id, label) {
    const last = control.options.length - 1;
    const slider = made("input", { id, name: control.name, type: "range", min: 0, max: last, step: 1 });
    const output = made("output", { for: id });
    label.append(output);
    this.shows[control.name] = (text) => {
      const place = control.options.findIndex(([known]) => known === text);
      slider.value = place;
      output.textContent = control.options[place][1];
      slider.setAttribute("aria-valuetext", control.options[place][1]);
    };
    slider.addEventListener("input", (event) => {
      this.choose(control.name, control.options[Number(slider.value)][0], event);
    });
    return slider;
  }

  listen() {
    at("controls").addEventListener("submit", (event) => event.preventDefault());
    at("reset").addEventListener("click", (event) => this.apply(this.first, event));
    at("plan").addEventListener("click", () => this.lookThroughAll());
    at("copy").addEventListener("click", () => this.copy(at("code").textContent, at("copied"), at("code")));
    at("share").addEventListener("click", () => {
      this.rememberInAddress();
      this.copy(location.href, at("shared"), null);
    });
    addEventListener("hashchange", () => {
      if (location.hash.replace(/^#/, "") !== this.written) {
        this.follow(location.hash);
        this.redraw();
      }
    });
  }

  // What is chosen

  choose(name, text, event) {
    this.chosen[name] = text;
    this.shows[name](text);
    at("refused").hidden = true;
    this.redraw(event);
  }

  apply(chosen, event) {
    this.take({ ...chosen });
    at("refused").hidden = true;
    this.redraw(event);
  }

  // Shows all choices; a folded group opens for one that is not the first.
  take(chosen) {
    this.chosen = chosen;
    for (const [name, text] of Object.entries(chosen)) {
      this.shows[name](text);
      if (text !== this.first[name]) at(`choice-${name}`).closest("details").open = true;
    }
  }

  follow(hash) {
    const { chosen, refused } = JSON.parse(this.formulas.linked(hash));
    this.take(chosen);
    at("refused").hidden = refused.length === 0;
    at("refused").textContent = refused.length ? `A part of the link could not be used: ${refused.join(" ")}` : "";
  }

  rememberInAddress() {
    this.written = this.formulas.link(JSON.stringify(this.chosen));
    history.replaceState(null, "", this.written ? `#${this.written}` : location.pathname + location.search);
  }

  // What is shown

  drawn() {
    try {
      return JSON.parse(this.formulas.draw(JSON.stringify(this.chosen)));
    } catch (problem) {
      return { refused: `the formulas failed, because of an error in this page: ${problem.message}` };
    }
  }

  redraw(event) {
    const drawn = this.drawn();
    const refused = "refused" in drawn;
    for (const id of OF_A_RUN) at(id).classList.toggle("stale", refused); // what is seen is of the last run
    at("copy").disabled = refused;
    if (refused) this.say("refused", "Not possible:", ` ${drawn.refused}.`);
    else this.show(drawn);
    if (event) this.time(event.timeStamp);
    this.asked += 1;
    this.questions = [];
    at("suggested").inert = true; // until it is of this choice
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.afterwards(), WAIT_MS);
  }

  show(drawn) {
    at("stack").innerHTML = drawn.stack;
    at("timeline").innerHTML = drawn.timeline;
    this.say(drawn.fits ? "fits" : "over", drawn.verdict, ` ${drawn.title}.`);
    at("phase").textContent = drawn.phase;
    at("code").textContent = drawn.code;
    at("rows").replaceChildren(...drawn.rows.map(([kind, bytes, shown]) => (
      made("tr", {}, made("th", { scope: "row" }, kind), made("td", {}, bytes), made("td", {}, shown)))));
  }

  say(state, strong, rest) {
    at("verdict").dataset.state = state;
    at("words").replaceChildren(made("strong", {}, strong), rest);
  }

  time(pressed) {
    requestAnimationFrame(() => {
      const channel = new MessageChannel(); // its message comes once the frame is painted
      channel.port1.onmessage = () => {
        this.tookMs = performance.now() - pressed;
        at("took").textContent = `Redrawn in ${Math.round(this.tookMs)} ms.`;
      };
      channel.port2.postMessage(null);
    });
  }

  // What to change next: asked for when nothing has changed for a while, and forgotten when something does.

  startSearcher() {
    this.searcher = this.newSearcher();
    this.searcher.onmessage = (message) => this.answered(message.data);
    this.searcher.onerror = (event) => this.noChanges(event.message ?? "the second thread did not start");
  }

  afterwards() {
    this.rememberInAddress();
    if (!this.searcher) this.startSearcher(); // once the first picture is there: it loads a Python of its own
    this.questions.push("changes");
    this.askNext();
  }

  lookThroughAll() {
    at("changes-words").textContent = "Searching hundreds of arrangements …";
    this.questions.push("plan");
    this.askNext();
  }

  askNext() {
    if (this.searching || !this.questions.length) return;
    this.searching = true;
    this.searcher.postMessage({ number: this.asked, what: this.questions.shift(), chosen: JSON.stringify(this.chosen) });
  }

  answered({ number, what, found, problem }) {
    this.searching = false;
    if (problem) this.noChanges(problem);
    else if (number === this.asked && what === "plan") this.showPlan(found);
    else if (number === this.asked) this.showChanges(found);
    this.askNext();
  }

  noChanges(problem) {
    at("changes-words").textContent = `This browser could not compute what to change next: ${problem}`;
  }

  showChanges(found) {
    at("suggested").inert = false;
    const refused = at("verdict").dataset.state === "refused";
    at("plan").hidden = refused;
    at("changes-words").textContent = refused ? "First choose what is possible." : found.length
      ? "Press a change to make it." : "No single change would help.";
    at("changes").querySelector("ol").replaceChildren(...found.map((change) => this.madeChange(change)));
  }

  showPlan(found) {
    at("changes-words").textContent = found
      ? "Of all arrangements of this training, this one fits the card and loses the least time:"
      : "No arrangement of this training fits this card.";
    if (found) at("changes").querySelector("ol").prepend(this.madeChange(found));
  }

  madeChange(change) {
    const effect = made("span", { class: "quiet" }, change.effect);
    const button = made("button", { type: "button" }, made("span", {}, change.words), effect);
    button.addEventListener("click", (event) => {
      this.apply(change.chosen, event);
      at("changes-title").focus();
    });
    return made("li", {}, button);
  }

  async copy(text, status, source) {
    try {
      await navigator.clipboard.writeText(text);
      status.textContent = "Copied.";
    } catch {
      if (source) getSelection().selectAllChildren(source);
      status.textContent = source ? "Selected: copy it with your keyboard." : "The link is this page's address.";
    }
    setTimeout(() => { status.textContent = ""; }, 4000);
  }
}

async function startPage() {
  at("verdict").hidden = false;
  const cameFrom = document.referrer && new URL(document.referrer);
  if (cameFrom && cameFrom.origin === location.origin) at("course").href = document.referrer;
  const reason = whyNot();
  if (reason) return fail(reason);
  try {
    const { startPython, startSearcher } = await import(HERE + "python.js");
    const { python, formulas } = await startPython((words) => { at("loading").textContent = words; });
    window.explorer = new Page(python, formulas, startSearcher); // for the curious: explorer.python in the browser's console
  } catch (problem) {
    fail(`The page could not start: ${problem.message ?? problem}. All files of its folder must be next to it.`);
  }
}

startPage();
