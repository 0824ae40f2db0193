// Order of the search results: a symbol of just this name, then the guides, then all other symbols and files. Somebody
// who searches for NaN or inf looks for its cause first.
var asked = new URLSearchParams(window.location.search).get("q") || "";
var Scorer = {
  score: ([page, title, , , score]) =>
    score + (/\b(nan|inf)\b/i.test(asked) && page === "overflows" ? 500 : 0) + (title.split(".").pop() === asked.trim() ? 2000 : /^(reference|files|_modules)\//.test(page) ? 0 : 1000),
  // Those of Sphinx.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
