// Draws the widgets of a lesson that runs in Python, as controls of the browser's own, and hands back what is done to them.

let numbers = 0;

export function made(tag, attributes = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

// For each kind of widget: its element, and how it is brought up to date.
const KINDS = {
  HTML: () => {
    const element = made("div", { class: "course-html" });
    let last = null;
    return [element, ({ value }) => { if (value !== last) element.innerHTML = last = value; }];
  },

  Dropdown: (live, { number }) => {
    const select = made("select");
    const [element, text] = labelled(select);
    let known = "";
    select.addEventListener("input", () => live.set(number, select.selectedIndex));
    return [element, (state) => {
      text.textContent = state.description;
      select.disabled = state.disabled;
      if (known !== JSON.stringify(state.options)) {
        known = JSON.stringify(state.options);
        select.replaceChildren(...state.options.map((option) => made("option", {}, option)));
      }
      select.selectedIndex = state.value;
    }];
  },

  SelectionSlider: (live, { number }) => slider(live, number, ({ options, value }) => [0, options.length - 1, options[value]]),
  IntSlider: (live, { number }) => slider(live, number, ({ min, max, value }) => [min, max, String(value)]),

  Checkbox: (live, { number }) => {
    const box = made("input", { type: "checkbox" });
    const text = made("span");
    box.addEventListener("input", () => live.set(number, box.checked));
    return [made("label", { class: "course-check" }, box, text), (state) => {
      text.textContent = state.description;
      box.checked = state.value;
      box.disabled = state.disabled;
    }];
  },

  Text: (live, { number, continuous_update }) => {
    const field = made("input", { type: "text", autocomplete: "off" });
    const [element, text] = labelled(field);
    field.addEventListener(continuous_update ? "input" : "change", () => live.set(number, field.value));
    return [element, (state) => {
      text.textContent = state.description;
      if (field.value !== state.value) field.value = state.value;
      field.disabled = state.disabled;
    }];
  },

  Button: (live, { number }) => {
    const button = made("button", { type: "button" });
    button.addEventListener("click", () => live.press(number));
    return [button, (state) => {
      button.textContent = state.description;
      button.disabled = state.disabled;
    }];
  },

  ToggleButton: (live, { number }) => {
    const button = made("button", { type: "button", class: "course-toggle" });
    let on = false;
    button.addEventListener("click", () => live.set(number, !on));
    return [button, (state) => {
      on = state.value;
      button.textContent = state.description;
      button.setAttribute("aria-pressed", on);
      if (state.tooltip) button.setAttribute("aria-label", `${state.tooltip}, ${on ? 1 : 0}`);
      button.title = state.tooltip ?? "";
      button.style.borderBottomColor = state.color ?? "";
    }];
  },

  Play: (live, { number }) => {
    const button = made("button", { type: "button" }, "Play");
    let now, timer;
    const stop = () => {
      clearInterval(timer);
      timer = null;
      button.textContent = "Play";
    };
    button.addEventListener("click", () => {
      if (timer) return stop();
      if (now.value >= now.max) live.set(number, now.min);
      button.textContent = "Pause";
      timer = setInterval(() => (now.value < now.max ? live.set(number, now.value + 1) : stop()), now.interval);
    });
    return [made("div", { class: "course-play" }, button), (state) => { now = state; }];
  },
};

function labelled(control) {
  control.id = `course-control-${numbers += 1}`;
  const text = made("span");
  return [made("div", { class: "course-control" }, made("label", { for: control.id }, text), control), text];
}

function slider(live, number, read) {
  const range = made("input", { type: "range", step: 1 });
  const [element, text] = labelled(range);
  const output = made("output", { for: range.id });
  element.querySelector("label").append(output);
  range.addEventListener("input", () => live.set(number, Number(range.value)));
  return [element, (state) => {
    const [min, max, said] = read(state);
    Object.assign(range, { min, max, disabled: state.disabled });
    range.value = state.value;
    text.textContent = state.description;
    output.textContent = said;
    range.setAttribute("aria-valuetext", said);
  }];
}

// Every widget on the page by its number, so that one answer of Python brings all up to date.
const shown = new Map();
let waiting = false;

export class Live {
  constructor(page, state, box) {
    this.page = page;
    page.tell(() => {
      if (!waiting) queueMicrotask(() => this.refresh());
      waiting = true;
    });
    box.replaceChildren(this.build(state));
    box.classList.add("course-moves");
    box.querySelector("input, select, button")?.focus({ preventScroll: true });
  }

  build(state) {
    const [element, update] = state.children ? this.box(state) : KINDS[state.kind](this, state);
    element.classList.add(`course-${state.kind.toLowerCase()}`);
    let classes = [];
    const bring = (now) => {
      element.classList.remove(...classes);
      element.classList.add(...(classes = now.classes));
      element.hidden = now.layout.display === "none";
      element.style.flexFlow = now.layout.flex_flow ?? "";
      update(now);
    };
    bring(state);
    shown.set(state.number, bring);
    return element;
  }

  box(state) {
    const element = made("div", { class: "course-box" });
    let inside = "";
    return [element, ({ children }) => {
      const now = children.map(({ number }) => number).join();
      if (now !== inside) element.replaceChildren(...children.map((child) => this.build(child)));
      inside = now;
    }];
  }

  set(number, value) {
    this.page.set_value(number, JSON.stringify(value));
    this.refresh();
  }

  press(number) {
    this.page.press(number);
    this.refresh();
  }

  refresh() {
    waiting = false;
    for (const state of JSON.parse(this.page.changes())) shown.get(state.number)?.(state);
  }
}
