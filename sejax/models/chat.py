"""Chat templates: Jinja in a sandbox, with the few names that templates of published models expect."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it renders as its contents."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def render(template: str, values: Mapping[str, Any]) -> str:
    """The template's text for `values`; ValueError says in a sentence what the template or its author refused."""
    try:
        return _compile(template).render(**values)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the model's chat template is not valid Jinja (line {error.lineno}: {error.message})") from None
    except jinja2.UndefinedError as error:
        raise ValueError(f"the model's chat template needs a value that the messages lack: {error.message}") from None
    except jinja2.TemplateError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error.message}") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"the model's chat template failed on these messages: {error}") from None


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
