"""The page's parts, called in the browser: Markdown, events, metrics; what a model may not do."""

import json
import time
from typing import Any

import pytest

from tests.page.conftest import LAST, ask, delta, script, set_field, until

# The elements of a text, written short: <p>a<em>b</em></p>, with the attributes that matter.
RENDER = """async ([text, steps]) => {
  const { Markdown } = await import("/page/markdown/markdown.js");
  const box = document.createElement("div");
  const markdown = new Markdown(box);
  for (let i = 1; i <= steps; i++) markdown.set(text.slice(0, Math.round(text.length * i / steps)));
  const shown = (node) => {
    if (node.nodeType === 3) return node.data;
    const tag = node.tagName.toLowerCase();
    if (tag === "button") return "";
    let name = tag;
    for (const key of ["href", "start"])
      if (node.hasAttribute(key)) name += `:${node.getAttribute(key)}`;
    if (tag === "input") name += node.checked ? ":on" : ":off";
    const inner = [...node.childNodes].map(shown).join("");
    return tag === "div" ? inner : inner ? `<${name}>${inner}</${tag}>` : `<${name}>`;
  };
  return [...box.childNodes].map(shown).join("");
}"""
CASES = {
    "plain": "<p>plain</p>",
    "a *b* **c** ***d*** _e_ __f__ ~~g~~": "<p>a <em>b</em> <strong>c</strong>"
    " <strong><em>d</em></strong> <em>e</em> <strong>f</strong> <del>g</del></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "**bold with *it* in**": "<p><strong>bold with <em>it</em> in</strong></p>",
    "**open": "<p>**open</p>",
    "\\*no\\* `a*b*c` ``x`y``": "<p>*no* <code>a*b*c</code> <code>x`y</code></p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A\n## B ##\n####### C": "<h3>A</h3><h4>B</h4><p>####### C</p>",
    "- a\n- b\n  - c\n\nend": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>end</p>",
    "3. a\n4. b": "<ol:3><li>a</li><li>b</li></ol>",
    "1. a\n\n2. b": "<ol><li>a</li><li>b</li></ol>",
    "- a\n\n  more\n- b": "<ul><li><p>a</p><p>more</p></li><li><p>b</p></li></ul>",
    "- [ ] a\n- [x] b": "<ul><li><input:off>a</li><li><input:on>b</li></ul>",
    "- a\n  ```\n  x\n  ```\n- b": "<ul><li>a<span>text</span><pre><code>x</code></pre></li>"
    "<li>b</li></ul>",
    "text\n- a": "<p>text</p><ul><li>a</li></ul>",
    "in 1986. yes\n1986. no": "<p>in 1986. yes<br>1986. no</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "---\n***": "<hr><hr>",
    "```py\nif x:\n```": "<span>py</span><pre><code><span>if</span> x:</code></pre>",
    "```\nopen <b>": "<span>text</span><pre><code>open <b></code></pre>",
    "````\n```\n````": "<span>text</span><pre><code>```</code></pre>",
    "| a | b |\n|---|--:|\n| 1 | `x|y` |\n| 2 |": "<table><thead><tr><th>a</th><th>b</th></tr>"
    "</thead><tbody><tr><td>1</td><td><code>x|y</code></td></tr><tr><td>2</td><td></tr></tbody></table>",
    "[a](https://x.y/z_(1)) <https://b.c> https://d.e/f.": "<p><a:https://x.y/z_(1)>a</a>"
    " <a:https://b.c>https://b.c</a> <a:https://d.e/f>https://d.e/f</a>.</p>",
    '[t](https://x.y "title") [**b**](mailto:a@b.c)': "<p><a:https://x.y>t</a>"
    " <a:mailto:a@b.c><strong>b</strong></a></p>",
    "[a](javascript:alert(1)) [b](data:text/html,x)": "<p><span>a</span> <span>b</span></p>",
    "![cat](https://x.y/c.png)": "<p><a:https://x.y/c.png>cat</a></p>",
    "<script>alert(1)</script> <img src=x onerror=alert(1)>": "<p><script>alert(1)</script>"
    " <img src=x onerror=alert(1)></p>",
    "a &lt;b&gt; &amp; &#x41; &bogus;": "<p>a <b> & A &bogus;</p>",
    "\\(x_1 + x_2\\) and $$y$$": "<p><code>x_1 + x_2</code> and <code>y</code></p>",
    "$$\na_b = c_d\n$$": "<code>a_b = c_d</code>",
}


def _render(page: Any, text: str, steps: int = 1) -> str:
    return str(page.evaluate(RENDER, [text, steps]))


@pytest.mark.parametrize("text", CASES)
def test_markdown(page: Any, text: str) -> None:
    assert _render(page, text) == CASES[text]


def test_markdown_that_grows_ends_as_the_whole(page: Any) -> None:
    long = "- a\n\n1. b\n\n2. c\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\n2. d"
    for text in (*CASES, "\n\n".join(CASES), long):
        assert _render(page, text, len(text)) == _render(page, text), text


PIECES = ["*a ", "**a ", "_a ", "`a ``b ", "[", "[a](", "![a](", "> ", "- ", "1. "]


@pytest.mark.parametrize("piece", [*PIECES, "\\", "&", "$$", "|a", "#", "<h", "~~"])
def test_no_text_takes_long(page: Any, piece: str) -> None:
    for text in (piece * 20_000, "\n".join([piece] * 5_000)):
        start = time.monotonic()
        _render(page, text)
        assert time.monotonic() - start < 3, piece


def test_what_a_model_writes_stays_text_everywhere(page: Any) -> None:
    evil = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>'
    call = {"index": 0, "id": evil, "function": {"name": evil, "arguments": evil}}
    script(
        page,
        delta(reasoning_content=evil),
        delta(content=f"{evil}\n\n```{evil}\n{evil}\n```\n\n[x](javascript:window.hurt=1)"),
        delta("tool_calls", tool_calls=[call]),
    )
    ask(page, evil)
    page.wait_for_selector(f"{LAST} .call pre")  # the answer is whole, and its thought folded
    page.click(f"{LAST} summary")
    until(page, lambda: evil in page.inner_text(f"{LAST} .thought-text"))
    assert evil in page.inner_text(f"{LAST} .content p")
    assert page.inner_text(f"{LAST} .call pre") == evil
    assert evil in page.inner_text(".bubble") and evil.split(">")[0] in page.inner_text(
        "#conversations a"
    )
    page.fill(f"{LAST} .call textarea", evil)
    page.click(":text('Send result')")
    page.wait_for_selector(".message.tool")
    page.reload()
    page.wait_for_selector(".message.tool")
    assert page.evaluate("window.hurt") is None
    assert page.locator("#thread img, #thread script, a[href^='javascript']").count() == 0


def test_the_policy_stops_markup_made_of_text(page: Any, new_page: Any) -> None:
    script = "() => { try { document.body.innerHTML = 'x' } catch (e) { return e.name } }"
    assert page.evaluate(script) == "TypeError"
    page.wait_for_timeout(100)
    assert len(new_page.complaints) == 1
    new_page.complaints.clear()


def test_events_come_out_whole_however_they_are_cut(page: Any) -> None:
    text = ': hello\n\ndata: {"a": "é"}\r\n\r\nevent: x\ndata:one\r\ndata: two\n\ndata: [DONE]\n\n'
    found = page.evaluate(
        """async (text) => {
          const { Events } = await import("/page/api.js");
          const all = new Set();
          for (let i = 0; i <= text.length; i++)
            for (let j = i; j <= text.length; j++) {
              const events = new Events();
              const parts = [text.slice(0, i), text.slice(i, j), text.slice(j)];
              all.add(JSON.stringify(parts.flatMap((part) => events.push(part))));
            }
          return [...all];
        }""",
        text,
    )
    assert [json.loads(row) for row in found] == [['{"a": "é"}', "one\ntwo", "[DONE]"]]


SAID = {"generated": 100, "hits": 100, "first": [[0.1, 10], [0.2, 30], [None, 40]]}


def test_numbers_are_read_and_turned_into_figures(page: Any) -> None:
    found = page.evaluate(
        """async (said) => {
          const { History, read, quantile } = await import("/page/metrics.js");
          const values = read(said);
          const { first } = values;
          const seen = new History();
          const of = (generated, hits, queries) => ({ generated, hits, queries });
          const series = {
            rate: (h) => h.rate("generated"), share: (h) => h.share("hits", "queries"),
          };
          const rows = [
            [0, 0, 0, 0], [2, 20, 5, 10], [4, 60, 5, 10], [6, 60, 5, 10], [20, 60, 5, 10],
            [21, 9, 0, 0],
          ];
          const points = rows.map(([at, ...row]) => seen.push(at, of(...row), series).points);
          return {
            generated: values.generated, hits: values.hits, names: Object.keys(values).length,
            half: quantile(0.5, first), most: quantile(0.99, first),
            since: quantile(0.5, first, [[0.1, 10], [0.2, 10], [Infinity, 10]]),
            none: quantile(0.5, first, first),
            points, kept: seen.rows.length,
          };
        }""",
        SAID,
    )
    assert (found["generated"], found["hits"], found["names"]) == (100, 100, 3)
    assert found["half"] == pytest.approx(0.15) and found["most"] == 0.2
    assert found["since"] == pytest.approx(0.175) and found["none"] is None
    rates = [point["rate"] for point in found["points"]]
    assert rates == [None, 10, 15, 10, 0, None]
    assert [p["share"] for p in found["points"]] == [None, 50, 50, 50, None, None]
    assert found["kept"] == 1, "what another run of the server counted is forgotten"


@pytest.mark.parametrize(
    ("most", "whole", "top", "step"),
    [
        (0, False, 1, 1),
        (61, False, 75, 25),
        (100, False, 100, 50),
        (0.02, False, 0.02, 0.01),
        (1, True, 1, 1),
        (3, True, 3, 1),
    ],
)
def test_axes_have_round_ticks(
    page: Any, most: float, whole: bool, top: float, step: float
) -> None:
    made = page.evaluate(
        "async ([m, w]) => (await import('/page/plots.js')).niceScale(m, w)", [most, whole]
    )
    assert (made["top"], made["step"]) == (pytest.approx(top), pytest.approx(step))


def test_code_is_coloured_and_keeps_its_text(page: Any) -> None:
    text = 'def f(x):  # "no"\n    return "a\\"b" + 0x1F + x1'
    found = page.evaluate(
        "async (t) => (await import('/page/markdown/highlight.js')).pieces(t, 'python')", text
    )
    assert "".join(part for _, part in found) == text
    named = [(name, part) for name, part in found if name]
    assert named == [
        ("k", "def"), ("c", '# "no"'), ("k", "return"), ("s", '"a\\"b"'), ("n", "0x1F"),
    ]  # fmt: skip


def test_json_that_is_cut_is_shown_as_it_came(page: Any) -> None:
    set_field(page, schema='{"type": "object"}')
    script(page, delta("length", content='{"a": ["```'))
    ask(page, "x")
    assert page.inner_text(f"{LAST} .code pre") == '{"a": ["```'


FORMULA = """async (text) => {
  const { Markdown } = await import("/page/markdown/markdown.js");
  const box = document.createElement("div");
  document.body.append(box);
  new Markdown(box).set(text);
  await import("/page/markdown/temml.min.js");
  await new Promise((done) => setTimeout(done, 50));
  const found = [...box.querySelectorAll("math, code.math")];
  const label = (e) => e.getAttribute("aria-label") ?? e.textContent;
  return found.map((e) => [e.tagName, label(e), e.getAttribute("display")]);
}"""


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        ("so $x^2$ and \\(a_i\\).", [["math", "x^2", None], ["math", "a_i", None]]),
        ("$$\n\\frac{a}{b}\n$$", [["math", "\\frac{a}{b}", "block"]]),
        ("\\[ \\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix} \\]", None),
        ("from $5 to $10, US$3, $HOME/bin:$PATH, `$x$`", []),
        (
            "$\\frac{a$ and $\\undefined{b}$",
            [["CODE", "\\frac{a", None], ["CODE", "\\undefined{b}", None]],
        ),
        ("$\\href{javascript:alert(1)}{x}$", [["CODE", "\\href{javascript:alert(1)}{x}", None]]),
        ("$\\def\\a{\\a\\a}\\a$", [["CODE", "\\def\\a{\\a\\a}\\a", None]]),
    ],
    ids=["inline", "block", "matrix", "no formula", "not understood", "link", "endless"],
)
def test_latex_becomes_mathml_or_stays_its_source(
    page: Any, text: str, formulas: list[list[str | None]] | None
) -> None:
    found = page.evaluate(FORMULA, text)
    if formulas is None:
        ((tag, label, display),) = found
        assert (tag, display) == ("math", "block") and "pmatrix" in label
        assert page.locator("math mtr").count() == 2
    else:
        assert found == formulas
