"""Messages, public docstrings and pages follow the rules of CONTRIBUTING.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("lightning_ddp_ext", "benchmarks", "examples", "docs")
VERBS_OF_PEOPLE = (
    r"(c[ao]m(e|es|ing)|meets?|met|asks?|asked|hears?|heard|says?|said|kn[eo]ws?|go|goes|went)"
)
AVOIDED = (
    "gone",
    "any more",
    "alike",
    "affair",
    "stood",
    "at once",
    "whoever",
    "somebody",
    "nobody",
    "everybody",
    "so many",
    "has to be told",
    "go on",
    "goes on",
)


class Rule(NamedTuple):
    """A wording to avoid: an example, a pattern that finds it, and the remedy."""

    example: str
    pattern: str
    remedy: str


RULES = [
    Rule(
        "every rank asks the store",
        rf"\branks? ([\w{{}}']+ ){{0,2}}{VERBS_OF_PEOPLE}\b",
        "ranks connect, call, wait, fail and exit",
    ),
    Rule(
        "this is no error",
        r"\b(is|are|was|were|be) (no(?! longer| \w+er than)|(?-i:none))\b",
        "is not a",
    ),
    Rule(
        "there is no rank that waits",
        r"\bthere (is|are) (no|nothing)\b[^.;:]* that\b",
        "name the subject",
    ),
    Rule("the run has ended", r"\b(has|have) (ended|come)\b", "simple present or past: exited"),
    Rule("the other rank exits, too", r", too\b(?! \w)", "also, before the verb"),
    Rule(
        "the error of a save",
        r"\b(error|failure|save|timeout|end)s? of an? (?!epoch|batch|(training )?step)\w+",
        "a noun compound: save error",
    ),
    Rule(
        "a file of its own",
        r"\bof (its|their) own\b(?! (batch|rank))",
        "another word, or none",
    ),
    *(Rule(words, rf"\b{words}\b", "another word, or none") for words in AVOIDED),
]
# Begins "The number of ranks" and "Returns the number of ranks", for example.
NOT_AN_IMPERATIVE = (
    r"(The|A|An|What|Which|Those|How|Whatever|Who|Whoever|Where|Why|When|If"
    r"|Returns|Raises|Yields|Gives)\b"
)


def python_texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string, except private docstrings."""
    nodes = list(ast.walk(tree))
    openings = [node.body[0] for node in nodes if is_private(node)]
    private = {id(opening.value) for opening in openings if isinstance(opening, ast.Expr)}
    f_strings = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    # Parts of f-strings are yielded together.
    skipped = private | {id(part) for f_string in f_strings for part in f_string.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.lineno, node.value


def is_private(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith("_")


def page_texts(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph, with x in the place of code."""
    without_code = re.sub(
        r"^```.*?^```$|`[^`\n]*`",
        lambda code: re.sub(r"[^\n]", "x", code[0]),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    for paragraph in re.finditer(r"(.+\n)+", without_code):
        yield without_code.count("\n", 0, paragraph.start()) + 1, paragraph[0]


def docstrings_without_imperative(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and opening of public docstrings of functions, except properties, that
    do not begin with an imperative.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not is_private(node):
            opening = re.match(NOT_AN_IMPERATIVE, ast.get_docstring(node) or "")
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            # ``property`` and ``cached_property``, also with their modules
            is_property = any(name.endswith("property") for name in decorators)
            if opening and not is_property:
                yield node.lineno, opening[0]


def findings(path: Path) -> Iterator[str]:
    """Yield place, words and remedy of each violation in a file."""
    name = path.relative_to(ROOT).as_posix()
    source = path.read_text()
    if path.suffix == ".md":
        texts = page_texts(source)
    else:
        tree = ast.parse(source)
        texts = python_texts(tree)
        for line, opening in docstrings_without_imperative(tree):
            yield f"{name}:{line}: {opening!r}: an imperative verb"
    for line, text in texts:
        for rule in RULES:
            for words in re.finditer(rule.pattern, " ".join(text.split()), re.IGNORECASE):
                yield f"{name}:{line}: {words[0]!r}: {rule.remedy}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.example)
def test_each_rule_finds_its_example(rule: Rule) -> None:
    """A rule that finds nothing in the project is therefore not broken."""
    assert re.search(rule.pattern, rule.example)


def test_sentences_follow_the_rules() -> None:
    """No message, public docstring or page has a wording that CONTRIBUTING.md forbids."""
    files = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md")
    ]
    found = [each for path in sorted([*files, *ROOT.glob("*.md")]) for each in findings(path)]
    assert not found, "\n".join(found)
