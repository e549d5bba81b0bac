// Names for screen readers that ipywidgets leaves out: what a slider's handle sets and says, what a player's button does.
const widget = this.closest(".course-explorable");
const name = () => {
  for (const handle of widget.querySelectorAll(".noUi-handle")) {
    const row = handle.closest(".jupyter-widgets");
    const label = row.querySelector(".widget-label"), readout = row.querySelector(".widget-readout");
    handle.setAttribute("aria-label", label ? label.textContent : "value");
    if (readout) handle.setAttribute("aria-valuetext", readout.textContent);
  }
  for (const icon of widget.querySelectorAll("button > i.fa")) {
    icon.parentElement.setAttribute("aria-label", icon.className.replace(/^.*fa-/, ""));
  }
};
new MutationObserver(name).observe(widget, { childList: true, subtree: true, characterData: true });
name();
