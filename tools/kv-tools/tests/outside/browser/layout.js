// Text that lies over other text, leaves the window, or is cut off: a sentence for each.
(() => {
  // What a phone calls the window grows with what does not fit.
  const width = document.documentElement.clientWidth;
  const found = [], texts = [], name = (node) => JSON.stringify(node.textContent.trim().slice(0, 40));
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(parent.tagName) || parent.closest(".skip")) continue;
    if (!parent.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    let scrolls = false;
    for (let box = parent; box && box !== document.body; box = box.parentElement) scrolls ||= getComputedStyle(box).overflowX === "auto";
    for (const rect of range.getClientRects()) {
      if (rect.width < 1 || rect.height < 1) continue;
      if (!scrolls && (rect.left < -0.5 || rect.right > width + 0.5)) found.push(`${name(node)} leaves the window`);
      texts.push({ node, rect });
    }
    for (let box = parent; box && box !== document.body; box = box.parentElement) {
      if (getComputedStyle(box).overflowX !== "hidden" || scrolls) continue;
      const outer = box.getBoundingClientRect(), inner = range.getBoundingClientRect();
      if (inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1) found.push(`${name(node)} is cut off`);
    }
  }
  texts.sort((a, b) => a.rect.top - b.rect.top);
  for (let i = 0; i < texts.length; i++)
    for (let j = i + 1; j < texts.length && texts[j].rect.top < texts[i].rect.bottom; j++) {
      const [a, b] = [texts[i].rect, texts[j].rect];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left), high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      // Lines of one text may be closer than their letters are high.
      if (wide > 2 && high > 3 && texts[i].node !== texts[j].node) found.push(`${name(texts[i].node)} lies over ${name(texts[j].node)}`);
    }
  const whole = document.documentElement.scrollWidth;
  if (whole > width) found.push(`the page is ${whole} wide in a window of ${width}`);
  return found;
})()
