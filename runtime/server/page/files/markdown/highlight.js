// Colours for code: comments, strings, numbers and keywords. No grammar of any language; one pass.

const WORDS = {
  c: "auto break case catch char class const constexpr continue default delete do double else enum explicit extern false final float fn for friend goto if impl implements import in inline instanceof int interface let long loop match mod mut namespace new noexcept null nullptr operator override package private protected pub public ref register return self short signed sizeof static struct super switch template this throw trait true try type typedef typename union unsafe unsigned use using var virtual void volatile where while async await yield export extends from function of undefined func defer go chan map range select string bool byte",
  python: "False None True and as assert async await break class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return self try while with yield case",
  shell: "if then else elif fi for while until do done case esac function in return export local set unset echo cd source exit sudo read trap",
  sql: "select from where and or not insert into values update set delete create table drop alter join left right inner outer full on group by order having limit offset as distinct union all null is in between like exists primary key foreign references index view with case when then else end",
  data: "true false null yes no on off",
};
const KIND = {};
const NAMES = {
  c: "c h cc cpp cxx hpp cuda cu java js javascript jsx ts typescript tsx go golang rust rs swift kotlin kt scala cs csharp php dart zig glsl css scss proto",
  python: "python py python3 ruby rb nim gdscript starlark",
  shell: "bash sh shell zsh fish console dockerfile makefile make powershell ps1 r perl pl",
  sql: "sql postgres postgresql mysql sqlite lua haskell hs",
  data: "json jsonc json5 yaml yml toml ini cfg conf properties env",
};
for (const [kind, names] of Object.entries(NAMES)) for (const n of names.split(" ")) KIND[n] = kind;

const STRING = `"(?:\\\\.|[^"\\\\\\n])*"|'(?:\\\\.|[^'\\\\\\n])*'|\`(?:\\\\[^]|[^\`\\\\])*\``;
const NUMBER = "\\b(?:0[xX][\\da-fA-F_]+|0[bB][01_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b";
const WORD = "[A-Za-z_$][\\w$]*";
const COMMENT = {
  c: "\\/\\/.*|\\/\\*[^]*?(?:\\*\\/|$)",
  python: '#.*|"""[^]*?(?:"""|$)',
  shell: "#.*",
  sql: "--.*",
  data: "#.*|\\/\\/.*",
};
const PATTERNS = {};
const SETS = {};
const LONGEST = 200_000; // characters of one block that are coloured

function pattern(kind) {
  const parts = `(${COMMENT[kind]})|(${STRING})|(${NUMBER})|(${WORD})`;
  PATTERNS[kind] ??= new RegExp(parts, "g");
  SETS[kind] ??= new Set(WORDS[kind].split(" "));
  return [PATTERNS[kind], SETS[kind]];
}

// [class or "", text] of the pieces of `code`, one after the other.
export function pieces(code, language) {
  const kind = KIND[language.toLowerCase()];
  if (!kind || code.length > LONGEST) return [["", code]];
  const [regex, words] = pattern(kind);
  const found = [];
  let last = 0;
  for (const match of code.matchAll(regex)) {
    const [text, comment, string, number, word] = match;
    const known = word && words.has(kind === "sql" ? word.toLowerCase() : word);
    const name = comment ? "c" : string ? "s" : number ? "n" : known ? "k" : "";
    if (!name) continue;
    if (match.index > last) found.push(["", code.slice(last, match.index)]);
    found.push([name, text]);
    last = match.index + text.length;
  }
  if (last < code.length) found.push(["", code.slice(last)]);
  return found;
}
