// Python in the browser: Pyodide and the course's own modules. A page imports `startPython`; a worker made of this file
// answers questions on a second thread, as looking for what to change next takes longer than a picture may.

const HERE = new URL(".", import.meta.url).href;

// `python`, and the module `formulas` that answers the page; `say` is told in words how far loading is.
export async function startPython(say = () => {}, archive = HERE + "course_utils.zip",
  module = "course_utils.interactive.explorer_page") {
  say("Loading Python: 13 MB, only the first time …");
  const { loadPyodide } = await import(HERE + "pyodide/pyodide.mjs");
  const python = await loadPyodide({ indexURL: HERE + "pyodide/", packageBaseUrl: HERE + "pyodide/" });
  say("Loading the course's formulas …");
  const answer = await fetch(archive);
  if (!answer.ok) throw new Error(`${archive.split("/").pop()}: the server answered ${answer.status}`);
  python.unpackArchive(await answer.arrayBuffer(), "zip");
  return { python, formulas: python.pyimport(module) };
}

// A second thread: one question { number, what, chosen }, one answer { number, what, found } or { number, what, problem }.
export function startSearcher() {
  return new Worker(import.meta.url, { type: "module" });
}

function answerQuestions() {
  const started = startPython();
  onmessage = async (message) => {
    const { number, what, chosen } = message.data;
    try {
      const { formulas } = await started;
      postMessage({ number, what, found: JSON.parse(formulas[what](chosen)) });
    } catch (problem) {
      postMessage({ number, what, problem: String(problem.message ?? problem) });
    }
  };
}

if (typeof document === "undefined") answerQuestions();
