// Small helpers to make elements. Text always goes in as text: nothing of an answer is read as HTML.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// For screen readers: what has ended, not every token.
export function announce(text) {
  byId("announcer").textContent = text;
}

export function rounded(value, digits) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}

// Bars of the share of drafts that were accepted, by position.
export function showAcceptance(place, accepted, tested) {
  place.replaceChildren(
    ...tested.map((count, index) => {
      const share = count ? accepted[index] / count : 0;
      const bar = make("span", { class: "bar" });
      // A property, not an attribute: the page's policy allows no inline styles.
      bar.style.setProperty("--share", share);
      const label = `${Math.round(100 * share)} %`;
      const title = `draft ${index + 1}: ${accepted[index]} of ${count} accepted`;
      return make("span", { class: "position", title }, `draft ${index + 1}`, bar, label);
    }),
  );
}
