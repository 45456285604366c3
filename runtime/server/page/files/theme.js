// Runs before anything is drawn: a theme that was chosen holds from the first moment.
{
  const chosen = localStorage.getItem("spark.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
