"""Chat templates that a stranger may write: each would take hours or all memory, if nobody counted."""

from __future__ import annotations


def _doubling(start: str, step: str, use: str) -> str:
    """Return a template that puts a value together from itself sixty times, and then uses it."""
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}{use}"
    )


def _often(work: str, before: str = "") -> str:
    """Return a template that does something 99,999 times."""
    return f"{before}{{% for i in range(99999) %}}{{% if {work} %}}{{% endif %}}{{% endfor %}}"


_LONG = "{% set x = 'a' * 200000 %}"
_PAIRS, _TUPLES = ("['a']", "[ns.x, ns.x]"), ("('a',)", "(ns.x, ns.x)")

ENDLESS: dict[str, str] = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that pass over all": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "macros that call themselves twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "loops that call themselves": "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}"
    "{% endif %}{% endfor %}",
    "macros without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "blocks without an end": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "generated parts": "{% generation %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endgeneration %}",
    "filters that go through": _often("range(99999) | select('none') | list"),
    "filters that sort": _often("range(99999) | sort"),
    "filters that compare": _often("range(99999) | unique | list"),
    "filters that group": _often("range(99999) | groupby('real')"),
    "filters in JSON": _often("range(99999) | list | tojson"),
    "filters that add lists": _often("([[1]] * 20000) | sum(start=[])"),
    "filters that take tags out": _often("('<!---->' * 30000) | striptags"),
    "filters that wrap": _often("('a' * 200000) | wordwrap(1)"),
    "searches in ranges": _often("5.5 in range(99999)"),
    "searches in lists": _often("x.count('a')", "{% set x = range(9999) | list %}"),
    "searches in texts": _often("'b' in x", _LONG),
    "comparisons of texts": _often("x == y", _LONG + "{% set y = 'a' * 199999 + 'b' %}"),
    "methods of texts": _often("x.isalpha()", _LONG),
    "slices of texts": _often("x[1:]", _LONG),
    "slices of lists": _often("x[1:]", "{% set x = range(9999) | list %}"),
    "written values": _doubling(*_PAIRS, "{{ ns.x }}"),
    "values in JSON": _doubling(*_PAIRS, "{{ ns.x | tojson }}"),
    "joined values": _doubling(*_PAIRS, "{{ ns.x ~ '' }}"),
    "compared values": _doubling(*_PAIRS, "{{ ns.x == [ns.x[0], ns.x[1]] }}"),
    "hashed keys": _doubling(*_TUPLES, "{{ {ns.x: 1} }}"),
    "looked up keys": _doubling(*_TUPLES, "{{ {}.get(ns.x) }}"),
    "searched keys": _doubling(*_TUPLES, "{{ ns.x in {} }}"),
    "values in errors": _doubling(*_PAIRS, "{{ raise_exception(ns.x) }}"),
    "values in formats": _doubling(*_PAIRS, "{{ '%s' % ns.x }}{{ '{}'.format(ns.x) }}"),
    "rounded numbers": "{{ 5 | round(-10**9) }}",
    "powers": "{{ 10 ** (10 ** 9) }}",
    "the source itself": "{{ a }}" * 50_000,
    "brackets in brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "loops in the source": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "signs in the source": "{{ " + "-" * 20000 + "1 }}",
}
HUGE: dict[str, str] = {
    "times": "{{ 'a' * 10**9 }}",
    "times a list": "{{ [0] * 10**9 }}",
    "times marked-up text": "{{ ('a' | safe) * 10**9 }}",
    "sums": _doubling("'a'", "ns.x + ns.x", ""),
    "joined texts": _doubling("'a'", "ns.x ~ ns.x", ""),
    "sums of lists": _doubling("['a']", "ns.x + ns.x", ""),
    "texts in a list": "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}"
    "{% set ns.l = ns.l + ['a' * 100000] %}{% endfor %}",
    "centred": "{{ 'a' | center(10**9) }}",
    "centred by a method": "{{ 'a'.center(10**9) }}{{ 'a'.ljust(10**9) }}{{ 'a'.zfill(10**9) }}",
    "centred by a block": "{% filter center(10**9) %}a{% endfilter %}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(10**7) }}",
    "indented": "{{ ('\\n' * 1000) | indent(10**7) }}",
    "indented JSON": "{{ [1, 2] | tojson(indent=10**9) }}",
    "replaced": "{{ ('a' * 10000).replace('a', 'b' * 100000) }}",
    "replaced by a filter": "{{ ('a' * 10000) | replace('a', 'b' * 100000) }}",
    "replaced in marked-up text": "{{ (('a' * 10000) | safe).replace('a', 'b' * 100000) }}",
    "joined by a method": "{{ ('b' * 100000).join('a' * 10000) }}",
    "joined by a filter": "{{ range(9999) | join('b' * 100000) }}",
    "translated": "{{ ('a' * 10000).translate({97: 'b' * 100000}) }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide format in its values": "{{ '%*d' % (10**9, 1) }}",
    "a wide place": "{{ '{:1000000000}'.format(1) }}",
    "a wide place in its values": "{{ '{:{}}'.format(1, 10**9) }}",
    "many places": "{{ ('{0}' * 10000).format('a' * 100000) }}",
    "many places by name": "{{ ('%(a)s' * 10000) % {'a': 'b' * 100000} }}",
    "many places of marked-up text": "{{ (('{0}' * 10000) | safe).format('a' * 100000) }}",
    "a number's bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "a list filled up": "{{ [1] | batch(10**9, 'x') | list }}",
    "many slices": "{{ [1] | slice(10**9) | list }}",
    "text kept in a variable": "{% set x %}{% for i in range(99999) %}" + "z" * 10000 + "{% endfor %}{% endset %}",
    "text written out": "{% for i in range(99999) %}" + "z" * 10000 + "{% endfor %}",
    "calls in calls": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 18
    + "x" * 1000
    + "{% endcall %}" * 18,
    "times as text": "{{ strftime_now('%c' * 100000) }}",
    "text at random": "{{ lipsum(10**9) }}",
}
