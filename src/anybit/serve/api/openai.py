"""Requests of OpenAI's API: what of them is served, and an error for everything else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from anybit.config import MAX_SEED, Json
from anybit.engine.sampling import Sampling
from anybit.errors import InputError
from anybit.serve.chat.constraint import Constraint
from anybit.serve.chat.conversation import conversation
from anybit.serve.chat.speech import PLAIN, Speech
from anybit.serve.chat.tools import held_to
from anybit.serve.errors import BadField, Refused
from anybit.serve.fields import Fields
from anybit.serve.run.request import AUTO, Request
from anybit.serve.served import Named, Served

MOST_TEXTS = 64  # of one request: prompts times n
MOST_STOPS, LONGEST_STOP = 16, 256  # strings, characters
MOST_LOGPROBS = 20  # tokens beside the one drawn
MOST_REPORTED = 1 << 19  # log-probabilities of a request: half a million take about a hundred MB
MOST_LOGITS = 1 << 28  # of a prompt that is scored inside Transformers, all at once: a GiB
MOST_BIASES = 1024  # tokens with a bias
MOST_TOKENS = 2**31 - 1
MOST_BITS = 1e3  # that can be meant as a width at all; the model says which it has
TARGETS = (0.01, 60_000.0)  # milliseconds from token to token
# What clients send that changes nothing of a text.
INERT = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "store",
)  # fmt: skip
NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """A request, checked."""

    chat: bool
    requests: list[Request]  # one for each prompt
    stream: bool = False
    usage: bool = False  # at the end of a stream
    logprobs: bool = False
    echo: bool = False  # the prompt is part of the text
    token_ids: bool = False  # of what is drawn
    speech: Speech = PLAIN  # how an answer of a chat is read
    most: int | None = None  # tokens that were asked for, where a request gets no more than the context holds
    said: Json = field(default_factory=dict)  # what the answer repeats of its request

    @property
    def n(self) -> int:
        return self.requests[0].n


def chat(served: Served, body: dict[str, Any], key: str) -> Wanted:
    """A body of /v1/chat/completions.

    Raises:
        InputError: what of it cannot be.
        Refused: another model.
    """
    fields = Fields(body)
    asked = conversation(fields)
    fields.only("modalities", ["text"])
    top = fields.whole("top_logprobs", None, 0, MOST_LOGPROBS)
    logprobs = fields.flag("logprobs")
    if top and not logprobs:
        raise BadField("top_logprobs", "top_logprobs needs logprobs: true")
    most = fields.whole("max_completion_tokens", None, 1, MOST_TOKENS)
    fewer = fields.whole("max_tokens", most, 1, MOST_TOKENS)
    if most is not None and fewer != most:
        raise BadField("max_tokens", "max_tokens and max_completion_tokens differ: give one of them")
    request = _request(served, fields, key, (top or 0) if logprobs else None)
    stream, usage = _streaming(fields)
    token_ids = fields.flag("return_token_ids")
    fields.finish()
    prompt = served.encode_chat(asked)
    request, speech = replace(request, tokens=prompt.tokens, most=fewer), prompt.speech
    if asked.tools is not None:
        if request.constraint is not None:
            raise BadField("tools", "tools and a form of the text do not go together: give one of them")
        if request.stop:
            raise BadField("stop", "stop could end a call in its middle: leave it or tools out")
        constraint = held_to(asked.tools, speech, served.tokenizer, served.constraint)
        request = replace(request, constraint=constraint)
    elif request.constraint is not None:  # the whole answer is that form, with no thought before it
        speech = PLAIN
    if speech is not PLAIN:
        request = replace(request, shown=prompt.shown)
    if logprobs:
        (request,) = _bounded(served, [request], top or 0)
    return Wanted(True, [request], stream, usage, logprobs, token_ids=token_ids, speech=speech)


def completions(served: Served, body: dict[str, Any], key: str) -> Wanted:
    """A body of /v1/completions.

    Raises:
        InputError: what of it cannot be.
        Refused: another model.
    """
    fields = Fields(body)
    prompts = _prompts(fields.any("prompt"))
    top = fields.whole("logprobs", None, 0, MOST_LOGPROBS)
    echo = fields.flag("echo")
    most = fields.whole("max_tokens", 16, 0, MOST_TOKENS)
    if most == 0 and not echo:
        raise BadField("max_tokens", "max_tokens is 0, expected 1 or more without echo")
    fields.only("suffix", "")
    request = _request(served, fields, key, top)
    fields.only("best_of", 1, request.n)
    stream, usage = _streaming(fields)
    token_ids = fields.flag("return_token_ids")
    fields.finish()
    if len(prompts) > 1 and not served.engine.together:
        raise BadField(
            "prompt", f"{len(prompts)} prompts: this model runs inside Transformers, one at a time"
        )
    if len(prompts) * request.n > MOST_TEXTS:
        raise BadField("prompt", f"{len(prompts)} prompts by n = {request.n}: at most {MOST_TEXTS} texts")
    request = replace(request, most=most, every=echo and top is not None)
    requests = [
        replace(request, tokens=served.encode(prompt) if isinstance(prompt, str) else prompt)
        for prompt in prompts
    ]
    if top is not None:
        requests = _bounded(served, requests, top)
    if request.every and not served.engine.together:
        _refuse_many_logits(served, len(requests[0].tokens))
    return Wanted(False, requests, stream, usage, top is not None, echo, token_ids)


def _bounded(served: Served, requests: list[Request], top: int) -> list[Request]:
    """Requests whose log-probabilities are no more than `MOST_REPORTED`.

    Those that do not say how many tokens they want get fewer, so that nobody is refused who has asked for little.

    Args:
        served: the model.
        requests: of one body, so all of one kind.
        top: likely tokens beside each.

    Raises:
        BadField: there are more.
    """
    first, each = requests[0], top + 1
    texts = len(requests) * first.n
    scored = first.n * sum(len(one.tokens) for one in requests) if first.every else 0
    if first.most is None:
        most = (MOST_REPORTED // each - scored) // texts
        return [
            replace(one, most=most) if served.context - len(one.tokens) > most else one for one in requests
        ]
    reported = (scored + texts * first.most) * each
    if reported > MOST_REPORTED:
        raise BadField(
            "logprobs",
            f"{reported} log-probabilities ({scored} tokens of prompts and {texts * first.most} of texts, {each} for "
            f"each): at most {MOST_REPORTED}; ask for fewer texts, tokens or likely tokens at a time",
        )
    return requests


def _request(served: Served, fields: Fields, key: str, logprobs: int | None) -> Request:
    """What both kinds have, without a prompt."""
    bits = asked_bits(served, fields)
    target = fields.number("latency_target_ms", *TARGETS)
    n = fields.whole("n", 1, 1, MOST_TEXTS) or 1
    if not served.engine.together:
        _refuse_several(bits is not None or target is not None, n)
    if target is not None and bits is not None:
        raise BadField("latency_target_ms", "latency_target_ms chooses the width: leave bits out")
    fields.accept(*INERT, "verbosity", "cache_prompt")
    ignores_ends = fields.flag("ignore_eos")
    if fields.whole("min_tokens", 0, 0, MOST_TOKENS) and not ignores_ends:
        raise BadField("min_tokens", "min_tokens needs ignore_eos: true, with which no text ends early")
    return Request(
        [],
        n=n,
        sampling=_sampling(served, fields, logprobs),
        stop=fields.texts("stop", MOST_STOPS, LONGEST_STOP, least=0) or (),
        bits=bits,
        target=None if target is None else target / 1000,
        ignores_ends=ignores_ends,
        constraint=_constraint(fields, served.constraint),
        key=key,
        speculates=fields.flag("speculate", True),
    )


def _refuse_several(widths: bool, texts: int) -> None:
    """What a model inside Transformers does not do."""
    if widths:
        raise BadField("bits", "this model runs inside Transformers, which has one width: leave bits out")
    if texts > 1:
        raise BadField("n", f"this model runs inside Transformers, one text at a time: {texts} are asked for")


def _refuse_many_logits(served: Served, tokens: int) -> None:
    """A prompt whose logits would take too much memory."""
    most = MOST_LOGITS // served.vocabulary
    if tokens > most:
        raise BadField(
            "echo",
            f"the prompt has {tokens} tokens: this model runs inside Transformers, which gives log-probabilities of up "
            f"to {most}, all at once; shorten it, or leave echo or logprobs out",
        )


def asked_bits(served: Named, fields: Fields) -> float | str | None:
    """The width that is asked for, by `bits` or by a model's name.

    Raises:
        BadField: it is none.
        Refused: another model.
    """
    model, bits = fields.text("model") or served.name, fields.any("bits")
    name, at, asked = (model, "", "") if model == served.name else model.rpartition("@")
    if name != served.name:
        raise Refused(
            404, f"there is no model {model!r:.100} here, but {served.name!r}", "model_not_found", "model"
        )
    if at:
        try:
            of_name = asked if asked == AUTO else float(asked)
        except ValueError:
            raise BadField("model", f"model asks for {asked!r:.50} bits, expected a number or auto") from None
        if bits not in (None, of_name):
            raise BadField("bits", f"model asks for {asked} bits, and bits for others: give one of them")
        bits = of_name
    if bits is None or bits == AUTO:
        return bits
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not abs(bits) <= MOST_BITS:
        raise fields.bad("bits", bits, 'a number or "auto"')
    return float(bits)


def _sampling(served: Served, fields: Fields, logprobs: int | None) -> Sampling:
    given = {name: fields.any(name) for name in NUMBERS}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.bad(name, value, "a number")
    if given.get("top_k") == -1:  # how others write it off
        given["top_k"] = 0
    if isinstance(seed := given.get("seed"), int):
        given["seed"] = seed % (MAX_SEED + 1)
    try:
        return replace(served.sampling, **given, logit_bias=_biases(fields), logprobs=logprobs)
    except InputError as error:
        raise BadField(str(error).partition(" ")[0], str(error)) from None


def _biases(fields: Fields) -> dict[int, float]:
    asked = fields.any("logit_bias", {})
    if not isinstance(asked, dict) or len(asked) > MOST_BIASES:
        raise fields.bad("logit_bias", asked, f"an object of at most {MOST_BIASES} token ids")
    for token, bias in asked.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise fields.bad("logit_bias", token, "token ids as names")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise fields.bad("logit_bias", bias, "numbers from -100 to 100")
    # OpenAI's -100 bans a token.
    return {int(token): -math.inf if bias == -100 else bias for token, bias in asked.items()}


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several, each as text or as token ids."""
    several = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(several) > MOST_TEXTS:
        raise BadField("prompt", f"prompt has {len(several)} texts, expected at most {MOST_TEXTS}")
    for one in several:
        ids = isinstance(one, list) and all(type(token) is int for token in one)
        if not ids and not isinstance(one, str):
            raise BadField(
                "prompt", "prompt is expected to be a string, a list of token ids, or a list of those"
            )
    return several


def _streaming(fields: Fields) -> tuple[bool, bool]:
    """Whether pieces are sent as they come, and whether usage comes at the end."""
    stream, options = fields.flag("stream"), fields.inside("stream_options")
    if options is None:
        return stream, False
    usage = options.flag("include_usage")
    options.only("include_obfuscation", False)
    options.finish()
    if not stream:
        raise BadField("stream_options", "stream_options needs stream: true")
    return stream, usage


# ---- forms


def _constraint(fields: Fields, compile_form: Callable[[str, Any], Constraint]) -> Constraint | None:
    """The form that a text must have, by whichever of the fields for it is there."""
    asked = _response_format(fields) + _forms(fields, "guided_")
    if (inner := fields.inside("structured_outputs")) is not None:
        forms = _forms(inner, "")
        inner.finish()
        if not forms:
            raise BadField(
                "structured_outputs", "structured_outputs names no form: give json, regex, grammar or choice"
            )
        asked += forms
    if len(asked) > 1:
        raise BadField(
            asked[1][0], f"{asked[0][0]} and {asked[1][0]} both say which form a text has: give one"
        )
    for param, kind, form in asked:
        try:
            return compile_form(kind, form)
        except InputError as error:
            raise BadField(param, f"{param}: {error}") from None
    return None


def _forms(fields: Fields, prefix: str) -> list[tuple[str, str, Any]]:
    """As vLLM names them: (parameter, kind, form)."""
    made: list[tuple[str, str, Any]] = []
    if (schema := fields.any(f"{prefix}json")) is not None:
        made.append((f"{prefix}json", "json_schema", _schema(f"{prefix}json", schema)))
    for kind in ("regex", "grammar"):
        if (form := fields.text(f"{prefix}{kind}")) is not None:
            made.append((f"{prefix}{kind}", kind, form))
    if (choices := fields.texts(f"{prefix}choice", 1024, 4096)) is not None:
        made.append((f"{prefix}choice", "regex", "|".join(re.escape(choice) for choice in choices)))
    return made


def _response_format(fields: Fields) -> list[tuple[str, str, Any]]:
    asked = fields.inside("response_format")
    if asked is None:
        return []
    kind, inner = asked.text("type"), asked.inside("json_schema")
    asked.finish()
    if kind == "text" and inner is None:
        return []
    if kind == "json_object" and inner is None:
        return [("response_format", "json_schema", {"type": "object"})]
    if kind != "json_schema" or inner is None:
        raise asked.bad("type", kind, '"text", "json_object", or "json_schema" with json_schema')
    inner.accept("name", "description", "strict")  # a schema is always kept
    schema = _schema("response_format.json_schema.schema", inner.any("schema", {}))
    inner.finish()
    return [("response_format", "json_schema", schema)]


def _schema(param: str, schema: Any) -> dict[str, Any] | bool:
    if not isinstance(schema, dict | bool):
        raise BadField(param, f"{param} is expected to be a schema, which is an object")
    return schema
