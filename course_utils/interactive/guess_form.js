// The keyboard stays in the cell. After Enter it goes on to the button, because JupyterLab runs no cell from a field.
const widget = this.closest(".course-guess-form");
const [field, button] = [() => widget.querySelector("input"), () => widget.querySelector("button")];
let pressed = null; // where Enter was pressed: it may be released elsewhere
const note = (event) => { pressed = event.key === "Enter" ? event.target : null; };
widget.addEventListener("keydown", note, { capture: true });
widget.addEventListener("keyup", (event) => {
  const refused = widget.querySelector("[role=alert]") || !/\d/.test(field().value);
  if (event.key === "Enter" && event.target === field() && pressed === field() && !refused) button().focus();
});
