(() => {
  // In a notebook's output: the picture itself in place of the image before this script.
  let image = document.currentScript?.previousElementSibling;
  while (image && image.tagName !== "IMG") image = image.previousElementSibling;
  if (image?.matches(".course-figure")) {
    const next = image.nextElementSibling, narrow = next?.type === "image/svg+xml" ? next : null;
    const wide = decodeURIComponent(image.src.slice(image.src.indexOf(",") + 1));
    const page = document.createElement("div");
    page.className = "course-picture" + (narrow ? " course-reflows" : "");
    page.innerHTML = `${wide}${narrow?.textContent ?? ""}<div class="course-said" role="status"></div>`;
    for (const svg of page.querySelectorAll(":scope > svg")) svg.setAttribute("aria-label", image.alt);
    page.tabIndex = 0;
    page.setAttribute("role", "group");
    page.setAttribute("aria-label", "Figure: arrow keys read out its parts");
    narrow?.remove();
    image.replaceWith(page);
  }
})();
