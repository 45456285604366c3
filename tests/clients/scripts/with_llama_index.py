"""llama-index's OpenAILike, for servers of OpenAI's form."""

from asked import KEY, MODEL, NEXT, STORY, SUM, V1
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from report import Report, weather
from verdicts import Trial, holds, refused, same

trial = Trial()
REACH = {"model": MODEL, "api_base": V1, "api_key": KEY, "max_retries": 0, "context_window": 4096}
OFF = {"additional_kwargs": {"extra_body": {"enable_thinking": False}}}
CHAT = {**REACH, **OFF, "is_chat_model": True, "temperature": 0.0, "max_tokens": 200}
model = OpenAILike(is_function_calling_model=True, **CHAT)
ASK = [ChatMessage(role=MessageRole.USER, content=SUM)]
TOOL = FunctionTool.from_defaults(weather, fn_schema=Report)
NAMED = {"type": "function", "function": {"name": "weather"}}


def _call(**choice: object) -> object:
    answer = model.chat_with_tools([TOOL], user_msg=SUM, **choice)
    [call, *_] = model.get_tool_calls_from_response(answer)
    same(call.tool_name, "weather")
    return call.tool_kwargs


def _streamed_call() -> object:
    *_, last = model.stream_chat_with_tools([TOOL], user_msg=SUM, tool_required=True)
    return model.get_tool_calls_from_response(last)[0].tool_kwargs


async def _sum(text: str) -> str:
    return (await model.achat([ChatMessage(role="user", content=text)])).message.content


trial.says("chat", lambda: model.chat(ASK).message.content)
trial.says("streaming", lambda: "".join(part.delta or "" for part in model.stream_chat(ASK)))


@trial("completions")
def _() -> None:
    text = OpenAILike(is_chat_model=False, temperature=0.0, max_tokens=8, **REACH)
    whole = text.complete(STORY).text
    holds(whole)
    same("".join(part.delta for part in text.stream_complete(STORY)), whole)


@trial("conversation")
def _() -> None:
    more = [
        ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
        *ASK,
        model.chat(ASK).message,
        ChatMessage(role=MessageRole.DEVELOPER, content="Be kind."),
        ChatMessage(role=MessageRole.USER, content=NEXT),
    ]
    holds(model.chat(more).message.content)


trial.calls("tools, required", lambda: _call(tool_required=True))
trial.calls("tools, by name", lambda: _call(tool_choice=NAMED))
trial.calls("tools, streaming", _streamed_call)


@trial("tool results")
def _() -> None:
    first = model.chat_with_tools([TOOL], user_msg=SUM, tool_required=True)
    results = [
        ChatMessage(role="tool", content="mild", additional_kwargs={"tool_call_id": call.tool_id})
        for call in model.get_tool_calls_from_response(first)
    ]
    answer = model.chat_with_tools([TOOL], chat_history=[*ASK, first.message, *results])
    holds(answer.message.content, answer)


trial.calls(
    "structured",
    lambda: OpenAILike(should_use_structured_outputs=True, **CHAT).structured_predict(
        Report, PromptTemplate(SUM)
    ),
    lambda: model.structured_predict(
        Report, PromptTemplate(SUM), llm_kwargs={"tool_choice": "required"}
    ),
)


@trial("errors")
def _() -> None:
    error = refused(Exception, model.chat, ASK, top_p=2)
    same(getattr(error, "param", error), "top_p")


trial.eight(_sum)
trial.run()
