"""Jinja templates that come with models, run with a meter: a sandbox in which everything is counted.

A template is untrusted text. The sandbox gives it access to its own values only; it does not keep it from running for
ever, or from making a text as large as the memory. Here each round of a loop, each call, filter, operator, comparison
and output is counted before it is done (`WorkMeter`), by nodes that are added to the parsed template.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import _PassArg, pass_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from card.text.template_costs import (
    COMPARISONS,
    TEST_COMPARISONS,
    count_call,
    count_filter,
    count_format_spec,
    count_operator,
)
from card.text.template_environment import TemplateEnvironment
from card.text.work_meter import HOLDING, TemplateCostError, WorkMeter

_MOST_SOURCE_CHARS = 1 << 18  # published templates have up to some ten thousand
_NODES_PER_STEP = 4  # of a parsed template, each run at most once where a step is counted
_METER = "the meter"  # these names have blanks, so that no template can use them
_STEPS, _TEXT, _LOOK, _READ, _COMPARE = "count steps", "count text", "count look", "count read", "count comparison"
_MADE, _JOINED = "count made", "count joined"
_PIECE_CHARS = 64  # what each piece of a text that is split takes of memory, beside what it says
_GENERATORS = (types.GeneratorType, map, filter, zip, reversed)
_EACH = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})  # filters that go through their values
_ITSELF_COUNTED = (Macro, LoopContext, BlockReference)  # what they do is made of counted parts


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Return what a template writes.

    Raises: TemplateCostError if it takes more steps or text than a conversation of this size can need; whatever a
        template may raise, jinja2.TemplateError above all.
    """
    meter = WorkMeter(variables)
    text = _compiled(source).render({**variables, _METER: meter})
    meter.take(0)  # if it went too far somewhere, that is what is said
    return text


@functools.lru_cache(maxsize=128)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > _MOST_SOURCE_CHARS:
        raise TemplateCostError(
            f"the chat template has {len(source):,} characters, and at most {_MOST_SOURCE_CHARS:,} are possible; use a "
            "model with another chat template"
        )
    return _environment().from_string(source)


@functools.cache
def _environment() -> _MeteredEnvironment:
    return _MeteredEnvironment()


class _MeteredEnvironment(TemplateEnvironment):
    """The environment of chat templates; what a template does there is counted."""

    intercepted_binops = frozenset(TemplateEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(finalize=_read, optimized=False)  # nothing is computed while a template is compiled
        self.filters = {name: _metered_filter(name, one) for name, one in self.filters.items()}
        self.tests = {name: _metered_test(name, cast(Any, one)) for name, one in self.tests.items()}
        self.filters |= {_STEPS: _steps, _TEXT: _text, _LOOK: _look, _READ: _read, _COMPARE: _compare}
        self.filters |= {_MADE: _made, _JOINED: _joined}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        metered = _Meters(self).visit(source)
        return super()._generate(metered, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter(context)
        count_operator(meter, operator, left, right)
        return meter.made(self.binop_table[operator](left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        if isinstance(obj, _ITSELF_COUNTED):
            meter.take(1)
        else:
            args = tuple(list(_counted(meter, one)) if isinstance(one, _GENERATORS) else one for one in args)
            count_call(meter, obj, args, [kwargs[name] for name in kwargs if not name.startswith("_")])
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, list) and isinstance(getattr(obj, "__self__", None), str | bytes):
            meter.take(0, len(result) * _PIECE_CHARS)
        return meter.made(result)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):  # its hash may take for ever, and no conversation has such keys
            return self.undefined(obj=obj, name="a tuple")
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        formatter, pattern = _MeteredFormatter(self), value.__self__
        is_map = value.__name__ == "format_map"

        @pass_context
        def format_text(context: Context, /, *args: Any, **kwargs: Any) -> str:
            meter = _meter(context)
            if isinstance(pattern, Markup):
                raise TemplateCostError("the chat template formats marked-up text, which is not done here")
            if is_map:
                (kwargs,), args = args, ()
            formatter.meter = meter
            return formatter.vformat(pattern, args, kwargs)

        return cast("Callable[..., str]", format_text)


class _MeteredFormatter(SandboxedFormatter):
    meter: WorkMeter

    def format_field(self, value: Any, format_spec: str) -> Any:
        count_format_spec(self.meter, format_spec)
        self.meter.take(1, self.meter.read(value))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self.meter.read(value)
        return super().convert_field(value, conversion)


def _meter(context: Context) -> WorkMeter:
    return cast(WorkMeter, context.parent[_METER])


# ---- what is put into templates --------------------------------------------------------------------------------------


@pass_context
def _steps(context: Context, num_steps: int) -> bool:
    _meter(context).take(num_steps)
    return True


@pass_context
def _text(context: Context, num_chars: int) -> str:
    _meter(context).take(1, num_chars)
    return ""


@pass_context
def _look(context: Context, value: Any) -> Any:
    _meter(context).look(value)
    return value


@pass_context
def _made(context: Context, value: Any) -> Any:
    return _meter(context).made(value)


@pass_context
def _joined(context: Context, value: Any) -> Any:
    return _meter(context).joined(value)


@pass_context
def _read(context: Context, value: Any) -> Any:
    """Count what an output writes, or a filter reads."""
    meter = _meter(context)
    meter.take(1, meter.read(value))
    return value


@pass_context
def _compare(context: Context, left: Any, operator: str, right: Any) -> Any:
    meter = _meter(context)
    meter.take(1)
    meter.compare(operator, left, right)
    return COMPARISONS[operator](left, right)


class _Meters(NodeTransformer):
    """Adds counting nodes to a parsed template."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        num_chars = sum(len(one.data) for one in node.nodes if isinstance(one, nodes.TemplateData))
        if num_chars:
            node.nodes.insert(0, self._filtered(nodes.Const(num_chars), _TEXT, node))
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted_body(node)

    visit_Macro = visit_CallBlock = visit_FilterBlock = visit_Block = visit_AssignBlock = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._filtered(one, _READ, node) for one in node.nodes]
        return self._filtered(node, _JOINED, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._filtered(node.node, _LOOK, node)
            return self._filtered(node, _MADE, node)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = self._filtered(node.key, _READ, node)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1:
            operand = node.ops[0]
            return self._filtered(node.expr, _COMPARE, node, nodes.Const(operand.op), operand.expr)
        node.expr = self._filtered(node.expr, _READ, node)
        for operand in node.ops:
            operand.expr = self._filtered(operand.expr, _READ, node)
        return node

    def _counted_body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "test", None) is not None:
            node.test = self._placed(nodes.And(self._step(node.test, node), node.test), node)
        node.body.insert(0, self._placed(nodes.ExprStmt(self._step(node, node)), node))
        return cast(nodes.Node, node)

    def _step(self, counted: nodes.Node, node: nodes.Node) -> nodes.Expr:
        num_nodes = sum(1 for _ in counted.find_all(nodes.Node))
        return self._filtered(nodes.Const(1 + num_nodes // _NODES_PER_STEP), _STEPS, node)

    def _filtered(self, value: nodes.Expr, name: str, node: nodes.Node, *args: nodes.Expr) -> nodes.Expr:
        return cast(nodes.Expr, self._placed(nodes.Filter(value, name, list(args), [], None, None), node))

    def _placed(self, made: nodes.Node, node: nodes.Node) -> nodes.Node:
        made.set_lineno(node.lineno)
        made.set_environment(self._environment)
        return made


# ---- filters and tests -----------------------------------------------------------------------------------------------


def _counted(meter: WorkMeter, values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        meter.take(1)
        yield value


def _with_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that takes the context first, whatever its own first argument is."""
    match _PassArg.from_obj(cast(Any, function)):
        case _PassArg.context:
            return function
        case _PassArg.eval_context:
            return lambda context, *args, **kwargs: function(context.eval_ctx, *args, **kwargs)
        case _PassArg.environment:
            return lambda context, *args, **kwargs: function(context.environment, *args, **kwargs)
    return lambda context, *args, **kwargs: function(*args, **kwargs)


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    run = _with_context(function)

    @pass_context
    def metered(context: Context, value: Any = "", *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        if name == "join" and isinstance(value, _GENERATORS):
            value = list(_counted(meter, cast("Iterator[Any]", value)))
        elif name in _EACH and isinstance(value, (str, *HOLDING, *_GENERATORS)):
            value = _counted(meter, iter(cast("Iterator[Any]", value)))
        count_filter(meter, name, value, args, kwargs)
        result = run(context, value, *args, **kwargs)
        if isinstance(result, _GENERATORS):
            return _counted(meter, cast("Iterator[Any]", result))
        return result if result is value else meter.made(result)

    return metered


def _metered_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test that counts, where it compares; others look at one thing of a value."""
    if name not in TEST_COMPARISONS:
        return function
    run, operator = _with_context(function), TEST_COMPARISONS[name]

    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.take(1)
        meter.compare(operator, value, next(iter((*args, *kwargs.values())), None))
        return run(context, value, *args, **kwargs)

    return metered
