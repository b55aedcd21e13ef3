"""The pages on the web: what is in them, and how they behave in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from browser import Browser, find_chromium

from nanovllm.tour.html import write_html


@pytest.fixture
def page(toy, tmp_path):
    written = write_html(toy.project(), tmp_path / "out")
    assert [path.name for path in written] == ["01-till.html", "index.html"]
    return written[0]


def test_a_page_needs_no_network(page):
    text = page.read_text()
    assert re.findall(r'(?:src|href)="(?:https?:)?//[^"]*"|@import|url\(', text) == []
    assert (page.parent / "till.svg").exists()
    assert 'src="till.svg"' in text


def test_prose_source_and_values_are_there_and_directives_are_not(page):
    text = page.read_text()
    assert 'data-file="toyshop/till.py" data-first="42" data-last="43"' in text
    assert re.search(r'id="toyshop-till-py-L42"><a class="num"[^>]*data-page="3">42</a>', text)
    assert "<td><code>self.total</code></td><td><code>6</code></td>" in text
    assert '<td class="changed"><code>76</code></td>' in text
    assert "<!-- stop" not in text
    assert "[not a link][nowhere]" in re.sub(r"<[^>]*>", "", text)


# ---- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("no chromium: apt-get install chromium")
    browser = Browser()
    yield browser
    browser.close()


def lit(browser: Browser) -> list[str]:
    script = """[...document.querySelectorAll('.files .lit')]
                .map(l => l.querySelector('.num').textContent)"""
    return browser.run(script)


def test_the_source_follows_the_keys(browser, page):
    browser.open(page.as_uri())
    assert browser.run("document.querySelector('.progress').textContent") == "1/6"
    for _ in range(3):
        browser.press("j")
    assert browser.run("document.querySelector('section.now h2').textContent") == (
        "The second customer"
    )
    assert lit(browser) == ["42", "43"]
    assert browser.run("document.querySelector('.where span').textContent") == (
        "toyshop/till.py:42–43"
    )
    assert "10" in browser.run("document.querySelector('.live').textContent")
    browser.press("ArrowLeft")
    assert lit(browser) == ["52", "53", "54"]
    browser.press("End")
    assert browser.run("document.querySelector('.progress').textContent") == "6/6"
    assert browser.run("location.hash") == "#p6"


def test_the_source_follows_scrolling(browser, page):
    browser.open(page.as_uri(), height=500)
    top = "document.getElementById('p5').getBoundingClientRect().top"
    browser.run(f"scrollBy(0, {top} - 100)")
    browser.wait_for("document.querySelector('section.now').id === 'p5'")
    assert lit(browser) == ["46", "47", "48"]


def test_the_lit_range_can_be_seen(browser, page):
    browser.open(page.as_uri(), height=400)
    browser.press("End")
    box = "document.querySelector('.files').getBoundingClientRect()"
    line = "document.querySelector('.lit').getBoundingClientRect()"
    assert browser.run(f"{line}.top >= {box}.top && {line}.bottom <= {box}.bottom")


def test_links_lead_both_ways(browser, page):
    browser.open(page.as_uri())
    browser.run("document.querySelector('#p3 a[data-first=\"41\"]').click()")
    assert lit(browser) == ["41", "42", "43", "44", "45"]
    browser.run("document.querySelector('#toyshop-till-py-L47 .num').click()")
    assert browser.run("document.querySelector('section.now').id") == "p5"


def test_light_and_dark(browser, page):
    shade = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"
    browser.open(page.as_uri(), dark=True)
    assert int(browser.run(shade)) < 60
    browser.press("t")
    assert int(browser.run(shade)) > 200
    browser.run("localStorage.clear()")
    browser.open(page.as_uri())
    assert int(browser.run(shade)) > 200


def test_a_phone_has_one_pane_with_the_code_in_the_prose(browser, page):
    browser.open(page.as_uri(), width=390, height=844)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    aside = "getComputedStyle(document.querySelector('aside')).display"
    assert browser.run(aside) == "none"
    excerpt = "document.querySelector('#p4 .excerpt')"
    assert "cost = price * 2" in browser.run(f"{excerpt}.innerText")
    assert "70" in browser.run("document.querySelector('#p4 .values').innerText")
    browser.run("document.querySelector('#p3 a[data-file]').click()")
    assert browser.run(aside) == "flex"
    browser.run("document.querySelector('.close').click()")
    assert browser.run(aside) == "none"


def test_a_deep_link_opens_at_its_stop(browser, page):
    browser.open(page.as_uri() + "#p4")
    assert lit(browser) == ["42", "43"]
