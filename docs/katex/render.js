// Typeset what pymdownx.arithmatex has marked. KaTeX (MIT licence, LICENSE.txt) lies in this folder: no network.
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    renderMathInElement(place, {
      delimiters: [
        { left: "\\[", right: "\\]", display: true },
        { left: "\\(", right: "\\)", display: false },
      ],
      throwOnError: false,
    });
  }
});
