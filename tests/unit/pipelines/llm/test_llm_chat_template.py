"""Issue 7, generation: the model's own chat template, sandboxed and bounded, and messages checked before it."""

import time
from datetime import datetime

import pytest

from edgeds.errors import InputError, ModelError
from edgeds.pipelines.llm import template_sandbox
from edgeds.pipelines.llm.chat_template import check_messages, pick_template, render_chat

pytest.importorskip("jinja2")

CHATML = """{% for message in messages %}
{% if loop.first and message.role != 'system' %}
{{ bos_token + '<|im_start|>system\\nBe kind.<|im_end|>\\n' -}}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
DOUBLING = "{{% set ns = namespace(s='x' * 999) %}}{{% for a in range(99) %}}{}{{% endfor %}}"
HELLO = [{"role": "user", "content": " Hi "}]


def render(template, messages=HELLO, **options):
    return render_chat(messages, template=template, **options)


def test_chatml_with_and_without_the_opening_of_the_answer():
    want = "<s><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML, bos="<s>", add_generation_prompt=False) == want
    assert render(CHATML, bos="<s>") == want + "<|im_start|>assistant\n"


def test_blocks_leave_no_blank_lines_behind():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_tools_time_values_and_loop_controls():
    template = (
        "{% for t in tools %}{{ t | tojson }}{% endfor %}|{{ strftime_now('%d %b %Y') }}|{{ enable_thinking }}|"
        "{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}|{{ eos_token }}"
    )
    got = render(
        template,
        tools=[{"name": "é<b>"}],
        eos="</s>",
        values={"enable_thinking": False},
        now=datetime(2026, 12, 1),
    )
    assert got == '{"name": "é<b>"}|01 Dec 2026|False|01|</s>'


def test_tools_are_none_when_there_are_none():
    assert render("{{ tools is none }}{% if tools %}x{% endif %}") == "True"


def test_tojson_indents_like_json():
    assert render('{{ {"b": [1], "a": none} | tojson(indent=2) }}') == '{\n  "b": [\n    1\n  ],\n  "a": null\n}'


def test_generation_tag_macros_namespaces_and_captured_blocks():
    template = (
        "{% macro say(x) %}<{{ x }}>{% endmacro %}{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{% generation %}{{ say(m.content) }}{% endgeneration %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{% set note %}n{{ ns.n }}{% endset %}{{ note ~ '!' ~ 1 }}"
    )
    assert render(template) == "< Hi >n1!1"


def test_text_parts_are_joined_and_other_parts_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"
    with pytest.raises(InputError, match=r"messages\[0\]: content\[0\] is of type 'image_url'"):
        render(CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_refusal_of_the_template_is_passed_on():
    with pytest.raises(InputError, match="refuses the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_model_without_a_template_is_one_sentence():
    for template in (None, ""):
        with pytest.raises(ModelError, match="has no chat template"):
            render(template)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{% if x %}", "line 2: Unexpected end of template"),
        ("{{ messages | nosuchfilter }}", "No filter named 'nosuchfilter'"),
        ("{{ messages.nothing.deep }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages + 1 }}", "cannot be filled in"),
        ("{% include 'x' %}", "no loader for this environment"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append.*unsafe"),
        ("{{ raise_exception.__globals__.os }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot be filled in|runs too long"),
        ("(" * 100 + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "chat template"),
        ("x" * ((1 << 20) + 1), "is 1048577 characters long"),
    ],
)
def test_broken_and_malicious_templates_are_one_sentence(template, words):
    with pytest.raises(ModelError, match=words) as caught:
        render(template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    ],
)
def test_endless_loops_end(template, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    begun = time.monotonic()
    with pytest.raises(ModelError, match="runs too long"):
        render(template)
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * ['x'] }}",
        "{{ 9 ** (9 ** 9) }}",
        DOUBLING.format("{% set ns.s = ns.s + ns.s %}"),
        DOUBLING.format("{% set ns.s = ns.s ~ ns.s %}"),
        DOUBLING.format("{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x' | indent(width=10**10, first=true) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' | format(10**10, 1) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ ('x' * 9999999).replace('x', 'y' * 9999999) }}",
        "{{ ('x' * 9999999) | replace('x', 'y' * 9999999) }}",
        "{{ (['x' * 9999999] * 9999) | join }}",
        "{{ ''.join(['x' * 9999999] * 9999) }}",
        "{% set t = 'x' * 999999 %}{% for a in range(99999) %}{{ t }}{% endfor %}",
    ],
)
def test_memory_bombs_are_refused_before_they_go_off(template):
    with pytest.raises(ModelError, match=r"chat template: it (makes|computes|formats)"):
        render(template)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "expected a list"),
        ({"role": "user"}, "expected a list"),
        ([], "the list is empty"),
        (["hello"], r"messages\[0\]: expected an object"),
        ([{"content": "x"}], r"messages\[0\]: role is None"),
        ([*HELLO, {"role": "robot", "content": "x"}], r"messages\[1\]: role is 'robot'"),
        ([{"role": ["user"], "content": "x"}], "role is"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": 5}], "content is int"),
        ([{"role": "user", "content": ["a"]}], r"content\[0\] is of type 'str'"),
    ],
)
def test_malformed_messages_are_named_by_position(messages, words):
    with pytest.raises(InputError, match=words):
        render(CHATML, messages)


def test_tool_calls_may_come_without_content_and_are_kept():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert check_messages([call]) == [call]


def test_template_among_several():
    several = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert pick_template(several) == "D"
    assert pick_template(several, has_tools=True) == "T"
    assert pick_template({"default": "D"}, has_tools=True) == "D"
    assert pick_template("x") == "x"
    assert pick_template(None) is None
    for wrong in (5, [{"name": "rag", "template": "R"}], ["x"]):
        with pytest.raises(ModelError, match="chat_template is neither"):
            pick_template(wrong)
