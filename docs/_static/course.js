// What answers on the pages: guesses, quizzes, the lessons' sliders and the first page's explorer. Rules and figures are Python's, from
// the course's own modules; nothing is loaded before something is touched. Without this file pages stay as they are, with answers to unfold.

import { python, problemOf } from "./python.js";
import { Live, made } from "./live.js";

const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

const asking = async (say) => {
  const found = await python(say);
  say("");
  return found.pyimport("course_page");
};

// Guesses

const kept = {
  get(key) {
    try {
      return JSON.parse(localStorage.getItem(`course-guess:${key}`));
    } catch {
      return null; // no storage here, or not ours
    }
  },
  set(key, guess) {
    try {
      localStorage.setItem(`course-guess:${key}`, JSON.stringify(guess));
    } catch { /* it is kept as long as the page */ }
  },
  forget(key) {
    try {
      localStorage.removeItem(`course-guess:${key}`);
    } catch { /* nothing was kept */ }
  },
};

class Guess {
  constructor(asked) {
    this.key = asked.dataset.guess;
    this.unit = asked.dataset.unit;
    const about = asked.textContent.trim().replace(/: run this cell.*$/, "");
    const said = `said-${this.key}`;
    this.field = made("input", { type: "text", inputmode: "decimal", autocomplete: "off", "aria-describedby": said });
    this.button = made("button", { type: "submit" }, "Lock it in");
    this.again = made("button", { type: "button", hidden: "" }, "Guess again");
    this.said = made("p", { class: "course-told", id: said, role: "status" });
    const label = made("label", {}, `${about} `, this.field);
    this.form = made("form", { class: "course-guess", "data-guess": this.key }, label, this.button, this.again, this.said);
    asked.replaceWith(this.form);
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.lock(); });
    this.field.addEventListener("focus", () => this.load(), { once: true });
    this.field.addEventListener("input", () => { if (!this.locked) this.say(""); });
    this.again.addEventListener("click", () => this.forget());
    const guess = kept.get(this.key);
    if (guess) this.show(guess);
  }

  say(words, wrong = false) {
    this.said.textContent = words;
    this.said.classList.toggle("course-wrong", wrong);
    if (wrong) this.field.setAttribute("aria-invalid", "true");
    else this.field.removeAttribute("aria-invalid");
  }

  async load() {
    try {
      this.page = await asking((words) => { if (!this.locked) this.say(words); });
      if (!this.locked) this.say("");
    } catch (problem) {
      this.say(problemOf(problem), true);
    }
    return this.page;
  }

  async lock() {
    const page = this.page ?? await this.load();
    if (!page || this.locked) return;
    const guess = JSON.parse(page.lock(this.field.value, this.unit));
    if (guess.problem) {
      this.say(guess.problem, true);
      this.field.focus();
      return;
    }
    guess.shown = {};
    for (const answer of answersTo(this.key)) {
      const { actual } = answer.dataset;
      if (actual !== undefined) guess.shown[actual] ??= page.compare(JSON.stringify(guess), actual);
    }
    kept.set(this.key, guess);
    this.show(guess);
    this.again.focus({ preventScroll: true });
  }

  show(guess) {
    this.locked = true;
    this.field.value = guess.said;
    this.field.readOnly = true;
    this.button.hidden = true;
    this.again.hidden = false;
    this.say("Your guess is locked. Now look below.");
    for (const answer of answersTo(this.key)) open(answer, guess);
  }

  forget() {
    kept.forget(this.key);
    this.locked = false;
    this.field.value = "";
    this.field.readOnly = false;
    this.button.hidden = false;
    this.again.hidden = true;
    this.say("");
    for (const answer of answersTo(this.key)) close(answer);
    this.field.focus();
    this.load();
  }
}

const answersTo = (key) => all("details.course-answer").filter((answer) => answer.dataset.guess === key);

function open(answer, guess) {
  answer.open = true;
  const shown = guess.shown?.[answer.dataset.actual];
  if (!shown) return;
  answer.querySelector(":scope > .course-compared")?.remove();
  const compared = made("div", { class: "course-compared" });
  compared.innerHTML = shown;
  answer.classList.add("course-has-guess");
  named(answer, "Your guess and the answer");
  answer.append(compared);
}

function close(answer) {
  answer.querySelector(":scope > .course-compared")?.remove();
  answer.classList.remove("course-has-guess");
  named(answer, answer.dataset.before);
  answer.open = false;
}

function named(answer, words) {
  const summary = answer.querySelector("summary");
  answer.dataset.before ??= summary.textContent;
  if (words) summary.textContent = words;
}

// Quizzes: the choices unfold by themselves, this counts

class Quiz {
  constructor(box) {
    this.questions = [];
    for (const part of all("p, details", box)) {
      if (part.matches("details p")) continue;
      if (part.matches("p")) this.text = part;
      else this.add(part);
    }
    this.score = made("p", { class: "course-score", role: "status" });
    box.append(this.score);
    this.count();
  }

  add(choice) {
    if (this.questions.at(-1)?.text !== this.text) this.questions.push({ text: this.text, opened: [] });
    const question = this.questions.at(-1);
    choice.addEventListener("toggle", () => {
      if (!choice.open || question.opened.includes(choice)) return;
      question.opened.push(choice);
      choice.classList.add(right(choice) ? "course-right" : "course-wrong");
      this.count();
    });
  }

  count() {
    const solved = this.questions.filter(({ opened }) => opened.some(right));
    const first = solved.filter(({ opened }) => right(opened[0]));
    const whole = this.questions.length;
    this.score.textContent = solved.length < whole ? `${solved.length} of ${whole} questions solved.`
      : `All solved, ${first.length} of ${whole} at the first try.`;
  }
}

const right = (choice) => choice.querySelector("summary + *")?.textContent.startsWith("Right.");

// Sliders of the lessons

function liven(box) {
  const button = made("button", { type: "button", class: "course-start" }, "Use the controls");
  const said = made("span", { role: "status" });
  box.prepend(made("p", { class: "course-starting" }, button, " ", said));
  const start = async () => {
    button.disabled = true;
    try {
      const page = await asking((words) => { said.textContent = words; });
      new Live(page, JSON.parse(page.show(box.dataset.code)), box);
    } catch (problem) {
      said.textContent = problemOf(problem);
      button.disabled = false;
    }
  };
  button.addEventListener("click", start);
}

// The first page's explorer

class Hero {
  constructor(box) {
    this.box = box;
    this.chosen = JSON.parse(box.dataset.first);
    this.form = box.querySelector("form");
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("focusin", () => this.load(), { once: true });
    this.form.addEventListener("input", (event) => this.choose(event.target.name, event.target.value));
    for (const field of all("select", this.form)) this.chosen[field.name] = field.value; // a browser may remember another
  }

  async load() {
    const said = this.box.querySelector(".course-loading");
    try {
      this.python ??= (await python((words) => { said.textContent = words; })).pyimport("first_page");
      said.textContent = "";
    } catch (problem) {
      said.textContent = problemOf(problem);
    }
    return this.python;
  }

  async choose(name, value) {
    this.chosen[name] = value;
    this.box.classList.add("course-waiting");
    const page = await this.load();
    if (!page) return;
    const drawn = JSON.parse(page.draw(JSON.stringify(this.chosen)));
    const verdict = this.box.querySelector(".course-verdict");
    this.box.classList.toggle("course-waiting", "refused" in drawn);
    verdict.dataset.state = drawn.fits ? "fits" : "over";
    const strong = made("strong", {}, drawn.refused ? "Not possible:" : drawn.verdict);
    verdict.replaceChildren(strong, ` ${drawn.refused ?? drawn.title}.`);
    if (drawn.refused) return;
    this.box.querySelector(".course-hero-picture").innerHTML = drawn.picture;
    const whole = this.box.querySelector(".course-all");
    whole.href = `${whole.href.split("#")[0]}${drawn.link && "#"}${drawn.link}`;
  }
}

for (const asked of all("p.course-ask")) new Guess(asked);
for (const box of all(".course-quiz")) new Quiz(box);
for (const box of all(".course-live")) liven(box);
for (const box of all(".course-hero")) new Hero(box);
