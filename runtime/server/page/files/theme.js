// Runs before anything is drawn: a theme that was chosen holds from the first moment.
try {
  const chosen = localStorage.getItem("spark.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // the browser allows no storage: the system's theme holds
}
