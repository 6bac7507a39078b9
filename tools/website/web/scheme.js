// Light or dark as it was chosen on the pages of the site, which keep it under the name of their folder.
{
  const key = Object.keys(localStorage).find((each) => each.endsWith(".__palette"));
  const { media, scheme } = (key && JSON.parse(localStorage.getItem(key)).color) || {};
  const isChosen = scheme && media !== "(prefers-color-scheme)";
  if (isChosen) document.documentElement.style.colorScheme = scheme === "slate" ? "dark" : "light";
}
