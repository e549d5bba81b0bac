// Python for the pages: Pyodide and the course's own modules, loaded once a page, when something is first touched.

import { startPython } from "../explorer/python.js";

const ARCHIVE = new URL("lessons.zip", import.meta.url).href;
const WHOLE = 13_500_000; // bytes of Pyodide and the archive, unpacked
let started = null;

// The module that answers pages; `say` is told how far loading is.
export function python(say) {
  started ??= load();
  started.listeners.add(say);
  started.ready.finally(() => started.listeners.delete(say)).catch(() => {});
  return started.ready;
}

function load() {
  const listeners = new Set();
  const say = (words) => listeners.forEach((listener) => listener(words));
  const ready = start(say).catch((problem) => {
    started = null; // another touch tries again
    throw problem;
  });
  return { listeners, ready };
}

async function start(say) {
  const counted = counting(say);
  try {
    return (await startPython(say, ARCHIVE, "course_page")).python;
  } finally {
    counted.stop();
  }
}

// Counts what arrives while Python loads, as Pyodide says nothing of it.
function counting(say) {
  const plain = globalThis.fetch;
  let arrived = 0;
  const count = new Set();
  globalThis.fetch = async (...asked) => {
    const answer = await plain(...asked);
    if (!answer.body) return answer;
    const counted = answer.body.pipeThrough(new TransformStream({
      transform(chunk, out) {
        arrived += chunk.byteLength;
        const percent = Math.min(99, Math.round((100 * arrived) / WHOLE));
        if (percent % 10 === 0 && !count.has(percent)) {
          count.add(percent);
          say(`Loading Python: ${percent} % of 13 MB, only the first time …`);
        }
        out.enqueue(chunk);
      },
    }));
    const same = { status: answer.status, statusText: answer.statusText, headers: answer.headers };
    return new Response(counted, same);
  };
  return { stop: () => { globalThis.fetch = plain; } };
}

export function problemOf(problem) {
  if (location.protocol === "file:") {
    return "A page that was opened as a file cannot load Python. Serve the site's folder instead: python3 -m http.server.";
  }
  return `Python could not start in this browser: ${problem.message ?? problem}`;
}
