// Names for screen readers that ipywidgets leaves out: what a slider's handle sets and says, what a player's button does.
const widget = this.closest(".course-explorable");
const name = () => {
  for (const handle of widget.querySelectorAll(".noUi-handle")) {
    const row = handle.closest(".widget-inline-hbox");
    const label = row.querySelector(".widget-label"), readout = row.querySelector(".widget-readout");
    handle.setAttribute("aria-label", label ? label.textContent : "value");
    const shown = readout && readout.textContent; // noUiSlider sets the number of the option, and does so again and again
    if (shown && handle.getAttribute("aria-valuetext") !== shown) handle.setAttribute("aria-valuetext", shown);
  }
  for (const icon of widget.querySelectorAll("button > i.fa")) {
    icon.parentElement.setAttribute("aria-label", icon.className.replace(/^.*fa-/, ""));
  }
};
const watched = { childList: true, subtree: true, characterData: true, attributeFilter: ["aria-valuetext"] };
new MutationObserver(name).observe(widget, watched);
name();
