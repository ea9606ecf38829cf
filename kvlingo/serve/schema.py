"""Bodies of requests: from JSON to what an engine is asked, or to a refusal that names the field.

Knows the shape of OpenAI's requests. Does not know HTTP or models. What is not supported is refused, never ignored: a field that
is left out of these classes is refused unless it says what happens anyway (`NEUTRAL`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from kvlingo.serve.protocol import Dial, Message, Request, Sampling

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "user": (),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's fields that are not supported, and the values that ask for nothing: with those, or null, they are accepted."""

LARGEST = 2**31 - 1
TYPE_NAMES = {"str", "int", "float", "bool", "list", "dict"}
Body = TypeVar("Body", bound=BaseModel)


class Refused(Exception):
    """A body that can't be served as it is; `param` names the field, where it is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


# --- the bodies ------------------------------------------------------------------------------------------------------


class Strict(BaseModel):
    """A table of fields: no other, and no text where a number belongs."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(Strict):
    """A part of a message. Pictures and sound are refused."""

    type: Literal["text"]
    text: str


class Function(Strict):
    """What an assistant called: `arguments` is JSON as text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that an assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(Strict):
    """One message, in any of the shapes that clients send."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, values: Any) -> Any:
        """Leave out what a client's own message objects carry along empty: `refusal: null`, `annotations: []`."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name == "content" or value not in (None, [])}

    @model_validator(mode="after")
    def _complete(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role tool needs tool_call_id")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        return self

    def plain(self) -> Message:
        """Return the message as chat templates take it; equal texts in different shapes become equal messages."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [plain_call(call) for call in self.tool_calls]
        return message


def plain_call(call: ToolCall) -> dict[str, Any]:
    """Return a call as templates take it: they write the arguments as JSON themselves, so text would be quoted twice."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    if not isinstance(arguments, dict):
        arguments = call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


class FunctionDefinition(Strict):
    """A function that may be called. `strict: true` would need its arguments to be forced: refused."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> Message:
        """Return the tool as chat templates take it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class JsonSchema(Strict):
    """A schema with a name. `strict` or not, the answer keeps to it."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: None = None
    form: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema and json_schema go together")
        return self

    def schema_text(self) -> str | None:
        """Return the schema as JSON; the order of its fields is that of the answer's."""
        if self.type == "text":
            return None
        return json.dumps(self.json_schema.form if self.json_schema else {"type": "object"}, ensure_ascii=False)


class StreamOptions(Strict):
    """What a stream tells beside the answer."""

    include_usage: bool = False


class DialBody(Strict):
    """How a switch of models may be made: `kvlingo` in a request."""

    mode: Literal["auto", "translate", "reprefill"] = "auto"
    sink: Annotated[int, Field(ge=0, le=LARGEST)] = 1
    tail: Annotated[int, Field(ge=1, le=LARGEST)] = 1


Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
TokenLimit = Annotated[int, Field(ge=1, le=LARGEST)]


class Common(Strict):
    """What both kinds of request have."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    max_tokens: TokenLimit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    min_p: Probability = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=1024),
    ] = Field(default_factory=dict)
    kvlingo: DialBody = DialBody()

    @model_validator(mode="after")
    def _stream_options_with_stream(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options is for streams only; set stream, or leave it out", "stream_options")
        return self

    def limit(self) -> int | None:
        """Return how many tokens the answer may have, if the request says."""
        return self.max_tokens

    def top(self) -> int | None:
        """Return how many likeliest tokens to tell for each token; None: no log-probabilities at all."""
        raise NotImplementedError

    def prompts(self) -> list[str | tuple[Message, ...]]:
        """Return what is to be answered, each `n` times."""
        raise NotImplementedError

    def shown_tools(self) -> tuple[Message, ...]:
        """Return the tools that the model is to see."""
        return ()

    def form(self) -> str | None:
        """Return the JSON schema that the answer must keep to, as JSON."""
        return None

    def sampling(self, default_limit: int, choice: int) -> Sampling:
        """Return how one choice is sampled; with a seed, each choice has its own."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_new_tokens=self.limit() or default_limit,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            min_p=self.min_p,
            seed=None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63,
            stop=tuple(stop),
            top_logprobs=self.top(),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): float(bias) for token, bias in self.logit_bias.items()},
            json_schema=self.form(),
        )


class ChatBody(Common):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat(type="text")

    @model_validator(mode="after")
    def _form_without_calls(self) -> ChatBody:
        if self.shown_tools() and self.form() is not None:
            raise Refused(
                "response_format: an answer in a form can't call tools; leave one of them out", "response_format"
            )
        return self

    @model_validator(mode="after")
    def _several_calls(self) -> ChatBody:
        if self.shown_tools() and not self.parallel_tool_calls:
            raise Refused("parallel_tool_calls: no model can be kept to one call; leave it out", "parallel_tool_calls")
        return self

    @model_validator(mode="after")
    def _top_with_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused("top_logprobs needs logprobs: true", "top_logprobs")
        return self

    def limit(self) -> int | None:
        """Return the new field's number before the old one's."""
        return self.max_completion_tokens or self.max_tokens

    def top(self) -> int | None:
        """Return the number asked for, 0 where only the chosen tokens' are."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def shown_tools(self) -> tuple[Message, ...]:
        """Return the tools; with `tool_choice: none` the model does not see them."""
        return tuple(tool.plain() for tool in self.tools) if self.tool_choice == "auto" else ()

    def form(self) -> str | None:
        """Return the schema."""
        return self.response_format.schema_text()

    def prompts(self) -> list[str | tuple[Message, ...]]:
        """Return the one conversation."""
        return [tuple(message.plain() for message in self.messages)]


class CompletionBody(Common):
    """The body of POST /v1/completions."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=16)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def top(self) -> int | None:
        """Return the number asked for."""
        return self.logprobs

    def prompts(self) -> list[str | tuple[Message, ...]]:
        """Return one prompt, or several."""
        return [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)


# --- reading them ----------------------------------------------------------------------------------------------------


def read_body(kind: type[Body], raw: bytes) -> Body:
    """Read a body, or raise `Refused`."""
    try:
        values = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is not JSON in UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise Refused("the body is not a JSON object; give an object of fields")
    try:
        return kind.model_validate(known_fields(kind, values))
    except ValidationError as error:
        raise refusal(error) from error


def known_fields(kind: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that say something: null counts as left out; a field of ours goes on, any other is refused."""
    known: dict[str, Any] = {}
    for name, value in values.items():
        if name in kind.model_fields:
            if value is not None:
                known[name] = value
        elif name not in NEUTRAL:
            raise Refused(f"unknown field {name[:80]!r}; leave it out", name[:80], "unknown_parameter")
        elif value is not None and not any(type(value) is type(x) and value == x for x in NEUTRAL[name]):
            accepted = " or ".join(["null", *(json.dumps(x) for x in NEUTRAL[name])])
            raise Refused(
                f"{name} is not supported; leave it out (accepted: {accepted})", name, "unsupported_parameter"
            )
    return known


def described_neutral() -> dict[str, Any]:
    """Describe the fields that are not supported and yet accepted, as properties of a JSON schema."""
    why = "not supported; accepted where it asks for nothing"
    return {name: {"enum": [None, *values], "description": why} for name, values in NEUTRAL.items()}


IN_OUR_WORDS = {
    "missing": "is missing; give it",
    "extra_forbidden": "is unknown; leave it out",
    "too_short": "is empty; give at least one",
    "too_long": "has too many entries",
    "string_too_short": "is empty",
    "string_pattern_mismatch": "is not of the form that it must have",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}
"""What pydantic says in words of its own code."""


def refusal(error: ValidationError) -> Refused:
    """Return the refusal for pydantic's errors: of the branches of a choice, the one that went deepest tells the most."""
    errors = error.errors(include_url=False, include_context=False)
    found = max(errors, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    place = [str(part) for part in found["loc"] if isinstance(part, int) or is_field(part)]
    param = ".".join(place) or None
    got = found["input"]
    shown = f", got {got!r}" if isinstance(got, (bool, int, float)) and len(repr(got)) < 40 else ""
    message = IN_OUR_WORDS.get(found["type"]) or found["msg"].removeprefix("Value error, ").replace(
        "Input should be", "must be"
    )
    code = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}.get(found["type"])
    return Refused(f"{param or 'the body'}: {message}{shown}", param, code or "invalid_value")


def is_field(part: str) -> bool:
    """Tell a field's name from the name of a branch's type, which pydantic puts into the place of an error."""
    return re.fullmatch(r"[a-z0-9_]+", part) is not None and part not in TYPE_NAMES


@dataclass(frozen=True)
class Order:
    """What one body asks for: for each prompt its choices. The first of each reads the prompt, the others go on from it."""

    groups: tuple[tuple[Request, ...], ...]
    stream: bool
    include_usage: bool

    @property
    def lanes(self) -> list[Request]:
        """Return all choices in the order of their indexes."""
        return [request for group in self.groups for request in group]


def order(body: Common, default_limit: int, *, room: int | None, tenant: str, conversation: str | None) -> Order:
    """Turn a body into requests. `room`: the tokens that the model reads and answers in all, if known."""
    limit = min(default_limit, room or default_limit)
    dial = Dial(body.kvlingo.mode, body.kvlingo.sink, body.kvlingo.tail)
    tools = body.shown_tools()
    groups = tuple(
        tuple(
            Request(body.model, prompt, body.sampling(limit, choice), dial, tenant, conversation, tools)
            for choice in range(body.n)
        )
        for prompt in body.prompts()
    )
    return Order(groups, body.stream, bool(body.stream_options and body.stream_options.include_usage))
