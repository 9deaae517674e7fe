// Where two answers differ: ranges of characters of each, by words.

const MAX_CELLS = 4_000_000;

export function differences(left, right) {
  const a = words(left);
  const b = words(right);
  let start = 0;
  while (start < a.length && start < b.length && a[start].text === b[start].text) start += 1;
  let tail = 0;
  while (
    tail < Math.min(a.length, b.length) - start &&
    a[a.length - 1 - tail].text === b[b.length - 1 - tail].text
  ) {
    tail += 1;
  }
  const middleA = a.slice(start, a.length - tail);
  const middleB = b.slice(start, b.length - tail);
  const [keptA, keptB] = common(middleA, middleB);
  return [ranges(middleA, keptA), ranges(middleB, keptB)];
}

function words(text) {
  return [...text.matchAll(/\s+|[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu)].map((match) => ({
    text: match[0],
    start: match.index,
    end: match.index + match[0].length,
  }));
}

// Positions of a longest common subsequence in each list; none for lists so long that it would take seconds.
function common(a, b) {
  const kept = [new Set(), new Set()];
  const width = b.length + 1;
  if (a.length * width > MAX_CELLS) return kept;
  const lengths = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      const at = i * width + j;
      lengths[at] =
        a[i].text === b[j].text ? lengths[at + width + 1] + 1 : Math.max(lengths[at + width], lengths[at + 1]);
    }
  }
  let i = 0;
  let j = 0;
  while (i < a.length && j < b.length) {
    if (a[i].text === b[j].text) {
      kept[0].add(i++);
      kept[1].add(j++);
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) {
      i += 1;
    } else {
      j += 1;
    }
  }
  return kept;
}

function ranges(list, kept) {
  const found = [];
  list.forEach(({ start, end }, index) => {
    if (kept.has(index)) return;
    const last = found.at(-1);
    if (last && last[1] === start) last[1] = end;
    else found.push([start, end]);
  });
  return found;
}
