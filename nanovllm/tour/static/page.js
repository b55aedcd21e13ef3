"use strict";
// Without this script the page is prose with links; with it the source follows the reader.
(() => {
  const root = document.documentElement;
  const sections = [...document.querySelectorAll("section")];
  const aside = document.querySelector("aside");
  const files = document.querySelector(".files");
  const narrow = matchMedia("(max-width: 900px)");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let now = -1;

  function light(file, first, last) {
    if (!files) return;
    for (const pre of files.children) pre.hidden = pre.dataset.file !== file;
    for (const line of files.querySelectorAll(".lit")) line.classList.remove("lit");
    const pre = [...files.children].find((p) => !p.hidden);
    if (!pre) return;
    const lines = [...pre.querySelectorAll(".line")].slice(first - 1, last);
    if (first) for (const line of lines) line.classList.add("lit");
    document.querySelector(".where span").textContent =
      file + (first ? ":" + first + (last > first ? "–" + last : "") : "");
    if (first && lines.length) {
      // The range in the middle, or its beginning near the top if it is long.
      const height = lines.at(-1).offsetTop + lines.at(-1).offsetHeight - lines[0].offsetTop;
      const above = Math.max((files.clientHeight - height) / 2, files.clientHeight / 8);
      files.scrollTop = lines[0].offsetTop - pre.offsetTop - above;
    } else files.scrollTop = 0;
    files.scrollLeft = 0;
  }

  function read(index) {
    if (index === now) return;
    now = index;
    const section = sections[index];
    sections.forEach((s, i) => s.classList.toggle("now", i === index));
    document.querySelector(".progress").textContent = index + 1 + "/" + sections.length;
    const values = section.querySelector(".values");
    // First, for it takes room from the source.
    document.querySelector(".live").innerHTML = values ? values.innerHTML : "";
    if (section.dataset.file) {
      light(section.dataset.file, +section.dataset.first, +section.dataset.last);
    }
  }

  let pinned = false; // a key or link chose the section; it stays until the reader scrolls
  function follow() {
    if (pinned) return;
    const third = innerHeight / 3;
    let index = 0;
    sections.forEach((s, i) => {
      if (scrollY > 8 && s.getBoundingClientRect().top < third) index = i;
    });
    read(index);
  }

  function go(index) {
    index = Math.max(0, Math.min(index, sections.length - 1));
    pinned = true;
    sections[index].scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "start" });
    read(index);
    history.replaceState(null, "", "#" + sections[index].id);
  }

  const openSource = (open) => aside && aside.classList.toggle("open", open);

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (event.target.closest(".close")) return openSource(false);
    if (event.target.closest(".theme")) return theme(root.dataset.theme === "dark" ? "light" : "dark");
    if (!link) return;
    if (link.dataset.file) {
      event.preventDefault();
      if (narrow.matches) openSource(true);
      light(link.dataset.file, +link.dataset.first, +link.dataset.last);
    } else if (link.dataset.page) {
      event.preventDefault();
      openSource(false);
      go(+link.dataset.page);
    }
  });

  function theme(name) {
    root.dataset.theme = name;
    try { localStorage.setItem("theme", name); } catch { /* file:// may forbid it */ }
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const help = document.querySelector("dialog");
    const keys = {
      j: () => go(now + 1), n: () => go(now + 1), ArrowRight: () => go(now + 1),
      k: () => go(now - 1), p: () => go(now - 1), ArrowLeft: () => go(now - 1),
      Home: () => go(0), End: () => go(sections.length - 1),
      t: () => theme(root.dataset.theme === "dark" ? "light" : "dark"),
      s: () => openSource(!aside.classList.contains("open")),
      Escape: () => openSource(false),
      "?": () => (help.open ? help.close() : help.showModal()),
    };
    if (["ArrowUp", "ArrowDown", "PageUp", "PageDown", " "].includes(event.key)) pinned = false;
    if (keys[event.key] && sections.length) {
      if (event.key !== "Escape") event.preventDefault();
      keys[event.key]();
    }
  });

  if (sections.length) {
    addEventListener("scroll", follow, { passive: true });
    addEventListener("resize", follow);
    for (const kind of ["wheel", "touchmove", "pointerdown"]) {
      addEventListener(kind, () => (pinned = false), { passive: true });
    }
    const start = sections.findIndex((s) => "#" + s.id === location.hash);
    const first = sections.find((s) => s.dataset.file);
    if (first) light(first.dataset.file, +first.dataset.first, +first.dataset.last);
    if (start >= 0) go(start);
    else follow();
  }
})();
