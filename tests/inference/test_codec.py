"""Between text and tokens: what the model wrote stays as it is, and everything around it is what the template says."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_cases import CHATML, byte_tokenizer

from cadenza.inference.codec import CHARACTERS, END, UNKNOWN, TemplateError, TextCodec, TokenizerNotFound, load_codec

BOARD = "P...\n.O.O\n...O\nO..G\n"

INSTRUCT = (  # spaces around answers, no generation prompt of its own, content stripped, no system role
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }} {{ eos_token }}"
    "{% else %}{{ raise_exception('no role ' + m['role']) }}{% endif %}"
    "{% endfor %}"
)
THINKING = (  # opens the answer in the prompt, and not in the history
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if not think %}<think></think>{% endif %}{% endif %}"
)
SYSTEM_LAST = (  # the system message stands in the last user message, wherever that is
    "{% set ns = namespace(s='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.s = m['content'] + '\n' %}"
    "{% elif m['role'] == 'user' %}[INST]{% if loop.last %}{{ ns.s }}{% endif %}{{ m['content'] }}[/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
NUMBERED = (
    "{% for m in messages %}<|start|>{% if m['role'] == 'user' %}{{ loop.index }}{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}<|start|>"
)
FIRST_ONLY = "{% if messages | length == 1 %}Welcome!{% endif %}" + CHATML
LAST_ONLY = CHATML.replace("<|end|>\n{% endfor", "{% if loop.last and loop.index > 1 %}!{% endif %}<|end|>\n{% endfor")
OTHER_END = (  # the last answer ends otherwise than those before
    "{% for m in messages %}<|start|>{{ m['content'] }}"
    "{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
MUTE = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str | None], Path]:
    def save(template: str | None) -> Path:
        byte_tokenizer(template).save_pretrained(tmp_path / "tokenizer")
        return tmp_path / "tokenizer"

    return save


@pytest.fixture(scope="module")
def builtin() -> TextCodec:
    return load_codec()


@pytest.fixture(
    params=["chatml", "instruct", "thinking", pytest.param("smollm2", marks=pytest.mark.slow)],
)
def chat(request: pytest.FixtureRequest, saved: Callable[[str | None], Path]) -> TextCodec:
    if request.param == "smollm2":
        return load_codec(request.getfixturevalue("smollm2"))
    if request.param == "thinking":
        return load_codec(saved(THINKING), template_options={"think": True})
    return load_codec(saved({"chatml": CHATML, "instruct": INSTRUCT}[request.param]))


class Context:
    """What `Model` does with a codec: prompts and responses, one behind the other."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.chunks: list[list[int]] = []

    def say(self, observation: str | Sequence[dict[str, str]]) -> list[int]:
        last = self.chunks[-1][-1] if self.chunks else None
        self.chunks.append(self.codec.encode(observation, first=not self.chunks, last=last).tolist())
        return self.chunks[-1]

    def hear(self, response: Sequence[int] | np.ndarray) -> None:
        self.chunks.append([int(token) for token in response])

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]

    @property
    def text(self) -> str:
        return shown(self.codec, self.tokens)


def shown(codec: TextCodec, tokens: Sequence[int]) -> str:
    """With the special tokens."""
    text: str = codec.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def rendered(codec: TextCodec, *said: str, **options: Any) -> str:
    """A conversation of user and assistant in turn, as the template writes it."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    text: str = codec.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    return text


# The built-in tokenizer


def test_the_module_loads_no_heavy_package() -> None:
    program = "import sys, cadenza.inference.codec; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "tokenizers", "jinja2"}.isdisjoint(done.stdout.split())


def test_a_board_costs_a_token_per_character() -> None:
    codec = load_codec()
    tokens = codec.encode(BOARD, first=True)
    assert tokens.dtype == np.int32
    assert len(tokens) == len(BOARD) == 20
    assert codec.decode(tokens) == BOARD
    assert codec.vocab_size == len(CHARACTERS) == 98
    assert codec.eos_token_ids == {codec.end_token_id}
    assert codec.template == "plain"


@given(pieces=st.lists(st.characters(exclude_categories=["Cs"]) | st.sampled_from(CHARACTERS)))
def test_the_table_does_what_the_tokenizer_does(pieces: list[str], builtin: TextCodec) -> None:
    text = "".join(pieces)
    tokens = builtin.encode(text, first=True).tolist()
    assert tokens == builtin.tokenizer.encode(text)
    assert builtin.decode(tokens) == builtin.tokenizer.decode(tokens, skip_special_tokens=True)
    assert builtin.decode(tokens) == "".join(c if c == "\n" or " " <= c <= "~" else UNKNOWN for c in text)


def test_every_text_can_be_encoded() -> None:
    codec = load_codec()
    for text in ("é", "\ud800", "\x00", "\r\n\t", "\U0001f9ca", ""):
        tokens = codec.encode(text, first=True)
        assert len(tokens) == len(text)
        assert codec.end_token_id not in tokens
    assert codec.decode(codec.encode("naïve", first=True)) == f"na{UNKNOWN}ve"


def test_a_text_that_names_the_end_token_ends_nothing() -> None:
    codec = load_codec()
    tokens = codec.encode(f"R{END}", first=True)
    assert codec.end_token_id not in tokens
    assert codec.decode(tokens) == f"R{END}"


def test_decoding_leaves_out_the_end_and_shows_what_is_unknown() -> None:
    codec = load_codec()
    assert codec.decode(codec.encode_answer("R")) == "R"
    assert codec.decode(np.array([CHARACTERS.index("R"), 1, 98, 5000], np.int32)) == "R" + 3 * UNKNOWN


def test_an_answer_that_was_cut_off_is_ended_by_the_next_prompt() -> None:
    codec = load_codec()
    context = Context(codec)
    end, board = codec.end_token_id, [CHARACTERS.index(c) for c in BOARD]
    assert context.say(BOARD) == board
    context.hear(codec.encode_answer("R"))
    assert context.say(BOARD) == board
    context.hear(codec.encode_answer("R")[:1])
    assert context.say(BOARD) == [end, *board]
    context.hear([])
    assert context.tokens.count(end) == 2
    assert codec.encode(BOARD, first=False).tolist() == board
    assert codec.encode(BOARD, first=True, last=board[0]).tolist() == board


def test_an_answer_needs_no_end_where_the_engine_stops_anyway() -> None:
    codec = load_codec()
    letter = CHARACTERS.index("R")
    assert codec.encode_answer("R").tolist() == [letter, codec.end_token_id]
    assert codec.encode_answer("R", max_tokens=2).tolist() == [letter, codec.end_token_id]
    assert codec.encode_answer("R", max_tokens=1).tolist() == [letter]
    with pytest.raises(ValueError, match="'RL' has 2 tokens, more than max_tokens 1"):
        codec.encode_answer("RL", max_tokens=1)


def test_messages_and_a_system_prompt_in_plain_form_are_lines() -> None:
    codec = load_codec(system="Go!")
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert codec.decode(codec.encode(messages, first=True)) == "Go!\na\nb"
    assert codec.decode(codec.encode(messages, first=False)) == "a\nb"


def test_a_directory_holds_a_model_and_the_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

    codec = load_codec()
    LlamaConfig(vocab_size=codec.vocab_size, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    codec.save(tmp_path)
    text = f"{BOARD}naïve {END}  ."
    expected = codec.encode(text, first=True).tolist()
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert loaded.encode(text) == expected
        assert loaded.decode([*expected, 0], skip_special_tokens=True) == codec.decode(expected)
        assert (len(loaded), loaded.eos_token_id) == (codec.vocab_size, codec.end_token_id)
    again = load_codec(tmp_path)
    assert type(again) is type(codec)
    assert again.encode(text, first=False, last=5).tolist() == [codec.end_token_id, *expected]
    assert again.eos_token_ids == codec.eos_token_ids


def test_the_table_is_many_times_faster_than_the_tokenizer() -> None:
    codec = load_codec()

    def seconds(function: Callable[[], Any]) -> float:
        times = []
        for _ in range(5):
            start = time.process_time()
            for _ in range(400):
                function()
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(lambda: codec.encode(BOARD, first=False, last=7)) * 5 < seconds(
        lambda: codec.tokenizer.encode(BOARD)
    )


# Chat templates


def test_a_canonical_conversation_is_what_the_template_writes(chat: TextCodec) -> None:
    context = Context(chat)
    said = ["Where to?", "Right", BOARD.strip(), "Down, then Right", "And now?"]
    for observation, answer in zip(said[::2], said[1::2], strict=False):
        context.say(observation)
        context.hear(chat.encode_answer(answer))
        assert chat.decode(context.chunks[-1]).strip() == answer
    context.say(said[-1])
    assert context.text == rendered(chat, *said, think=True)
    assert context.tokens == chat.tokenizer.encode(context.text, add_special_tokens=False)


def test_odd_responses_stay_as_they_were_drawn(chat: TextCodec) -> None:
    """Tokens that no tokenizer would choose for their text, among them special ones and broken UTF-8."""
    generator = np.random.default_rng(0)
    context = Context(chat)
    seen: list[int] = []
    tail = rendered(chat, "a", "b", "next", think=True).rpartition("b")[2].lstrip(" ")  # from the end token on
    for turn in range(4):
        prompt = context.say("next")
        response = [int(t) for t in generator.integers(0, chat.vocab_size, 30) if t not in chat.eos_token_ids]
        response += [chat.end_token_id] * (turn % 2)
        context.hear(response)
        seen += [*prompt, *response]
        assert isinstance(chat.decode(response), str)
        if turn:
            ended = chat.end_token_id if turn % 2 == 0 else None
            assert shown(chat, [ended, *prompt] if ended is not None else prompt) == tail
    assert context.tokens == seen
    assert chat.tokenizer.encode(context.text, add_special_tokens=False) != seen


def test_a_response_is_not_merged_with_another_tokenisation(saved: Callable[[str | None], Path]) -> None:
    codec = load_codec(saved(CHATML))
    letters = [codec.tokenizer.convert_tokens_to_ids(letter) for letter in "Right"]
    assert codec.encode_answer("Right").tolist() != [*letters, codec.end_token_id]
    context = Context(codec)
    context.say("a")
    context.hear([*letters, codec.end_token_id])
    context.say("b")
    assert context.text == rendered(codec, "a", "Right", "b")
    assert context.chunks[1] == [*letters, codec.end_token_id]


def test_a_cut_answer_is_ended_as_the_template_would(saved: Callable[[str | None], Path]) -> None:
    codec = load_codec(saved(CHATML))
    for cut, text in ((1, "Ri"), (0, "")):
        context = Context(codec)
        context.say("a")
        if cut:
            context.hear(codec.encode_answer("Right")[:cut])
        assert context.say("b")[0] == codec.end_token_id
        assert context.text == rendered(codec, "a", text, "b")


def test_only_the_end_of_a_turn_ends_it(saved: Callable[[str | None], Path]) -> None:
    codec = load_codec(saved(CHATML))
    eos = codec.tokenizer.eos_token_id
    assert codec.eos_token_ids == {codec.end_token_id, eos}
    assert codec.end_token_id != eos
    assert codec.encode("b", first=False, last=eos)[0] == codec.end_token_id
    assert codec.encode("b", first=False, last=codec.end_token_id)[0] != codec.end_token_id


def test_a_default_system_prompt_is_said_once(saved: Callable[[str | None], Path]) -> None:
    context = Context(load_codec(saved(CHATML)))
    for _ in range(3):
        context.say("a")
        context.hear(context.codec.encode_answer("b"))
    assert context.text.count("Be kind.") == 1
    assert context.text.startswith("<|start|>system\nBe kind.<|end|>\n<|start|>user\n")


@pytest.mark.slow
def test_smollm2_introduces_itself_once(smollm2: Path) -> None:
    codec = load_codec(smollm2)
    context = Context(codec)
    for _ in range(3):
        context.say("a")
        context.hear(codec.encode_answer("b"))
    assert context.text.count("named SmolLM") == 1
    assert codec.vocab_size == 49152
    assert shown(codec, sorted(codec.eos_token_ids)) == "<|im_end|>"


def test_a_system_prompt_is_said_first_unless_the_env_has_its_own(saved: Callable[[str | None], Path]) -> None:
    codec = load_codec(saved(CHATML), system="Be brief.")
    user = {"role": "user", "content": "a"}
    start = "<|start|>system\nBe {}.<|end|>\n<|start|>user\na<|end|>\n<|start|>assistant\n"
    assert shown(codec, codec.encode("a", first=True).tolist()) == start.format("brief")
    assert shown(codec, codec.encode([user], first=True).tolist()) == start.format("brief")
    own = [{"role": "system", "content": "Be long."}, user]
    assert shown(codec, codec.encode(own, first=True).tolist()) == start.format("long")
    assert "Be" not in shown(codec, codec.encode("a", first=False, last=0).tolist())


def test_messages_are_taken_as_they_are(saved: Callable[[str | None], Path]) -> None:
    codec = load_codec(saved(CHATML))
    messages = [{"role": "tool", "content": "3"}, {"role": "user", "content": "a"}]
    expected = "<|end|>\n<|start|>tool\n3<|end|>\n<|start|>user\na<|end|>\n<|start|>assistant\n"
    assert shown(codec, codec.encode(messages, first=False, last=0).tolist()) == expected


def test_an_observation_may_hold_anything(saved: Callable[[str | None], Path]) -> None:
    codec = load_codec(saved(CHATML))
    for text in ("Sentinel7", "Hello", "Sentinel7<|end|>\nSentinel7", "é \n", ""):
        tokens = codec.encode(text, first=False, last=0).tolist()
        assert shown(codec, tokens) == f"<|end|>\n<|start|>user\n{text}<|end|>\n<|start|>assistant\n"


def test_decoding_shows_no_special_tokens(saved: Callable[[str | None], Path]) -> None:
    codec = load_codec(saved(CHATML))
    start, eos = codec.tokenizer.convert_tokens_to_ids("<|start|>"), codec.tokenizer.eos_token_id
    assert codec.decode([start, *codec.encode_answer("a  b ."), eos]) == "a  b ."


def test_the_end_of_a_turn_may_be_an_ordinary_added_token(saved: Callable[[str | None], Path]) -> None:
    path = saved(None)
    tokenizer = byte_tokenizer(CHATML.replace("<|end|>", "[end]"))
    tokenizer.add_tokens(["[end]"])
    tokenizer.save_pretrained(path)
    codec = load_codec(path)
    assert codec.end_token_id == tokenizer.convert_tokens_to_ids("[end]")
    assert codec.decode(codec.encode_answer("Right")) == "Right"


def test_the_first_special_token_behind_an_answer_ends_it(saved: Callable[[str | None], Path]) -> None:
    """Phi-3 closes a conversation with eos, behind the end of the turn."""
    codec = load_codec(saved(CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"))
    assert codec.end_token_id == codec.tokenizer.convert_tokens_to_ids("<|end|>")


def test_an_answer_is_tokenised_as_it_stands_behind_the_prompt(saved: Callable[[str | None], Path]) -> None:
    """Some tokenizers put a space before every text; an answer is not the beginning of one."""
    from tokenizers.pre_tokenizers import ByteLevel

    path = saved(None)
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    tokenizer.save_pretrained(path)
    codec = load_codec(path)
    assert codec.decode(tokenizer.encode("Right")) == " Right"
    assert codec.decode(codec.encode_answer("Right")) == "Right"


def test_a_prompt_may_open_the_answer_where_the_history_does_not(saved: Callable[[str | None], Path]) -> None:
    context = Context(load_codec(saved(THINKING)))
    context.say("a")
    context.hear(context.codec.encode_answer("b"))
    context.say("c")
    asked = "<|start|>user\n{}<|end|>\n<|start|>assistant\n<think></think>"
    assert context.text == f"{asked.format('a')}b<|end|>\n{asked.format('c')}"


def test_a_template_may_show_old_answers_otherwise_when_a_tool_speaks(saved: Callable[[str | None], Path]) -> None:
    """Qwen3 opens answers with their thoughts as long as no user has spoken since."""
    codec = load_codec(saved(
        "{% set ns = namespace(asked=0) %}"
        "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.asked = loop.index %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and loop.index > ns.asked %}<think></think>{% endif %}"
        "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    ))  # fmt: skip
    for role in ("tool", "user"):
        tokens = codec.encode([{"role": role, "content": "3"}], first=False, last=0).tolist()
        assert shown(codec, tokens) == f"<|end|>\n<|start|>{role}\n3<|end|>\n<|start|>assistant\n"


def test_remembered_prompts_are_the_same_and_cannot_be_changed(chat: TextCodec) -> None:
    fresh = [chat.encode(f"{i}", first=False, last=i % 2 and chat.end_token_id).tolist() for i in range(1100)]
    again = [chat.encode(f"{i}", first=False, last=i % 2 and chat.end_token_id) for i in range(1100)]
    assert [tokens.tolist() for tokens in again] == fresh
    assert chat.encode("1", first=True).tolist() != fresh[1]
    assert chat.encode("1", first=True) is chat.encode("1", first=True)
    with pytest.raises(ValueError, match="read-only"):
        again[-1][0] = 0


def test_a_codec_crosses_processes(chat: TextCodec) -> None:
    for codec in (chat, load_codec()):
        copy = pickle.loads(pickle.dumps(codec))
        assert copy.encode(BOARD, first=False, last=5).tolist() == codec.encode(BOARD, first=False, last=5).tolist()
        assert copy.decode(copy.encode_answer("Right")) == codec.decode(codec.encode_answer("Right"))


def test_another_tokenizer_in_plain_form(saved: Callable[[str | None], Path]) -> None:
    codec = load_codec(saved(None), template="plain")
    context = Context(codec)
    context.say("a Right")
    context.hear(codec.encode_answer("Right"))
    context.say("b")
    context.hear(codec.encode_answer("Right", max_tokens=2))
    assert len(context.chunks[-1]) == 2
    context.say("c")
    assert context.text == "a RightRight</s>bRight</s>c"
    assert codec.eos_token_ids == {codec.end_token_id} == {codec.tokenizer.eos_token_id}


def test_a_tokenizer_that_begins_texts_does_so_once(saved: Callable[[str | None], Path]) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    begin = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[begin])
    path = saved(None)
    tokenizer.save_pretrained(path)
    codec = load_codec(path, template="plain")
    assert shown(codec, codec.encode("a", first=True).tolist()) == "<s>a"
    assert shown(codec, codec.encode("a", first=False, last=0).tolist()) == "</s>a"
    assert shown(codec, codec.encode_answer("a").tolist()) == "a</s>"


# What cannot be


def test_a_tokenizer_without_a_chat_template_is_named(saved: Callable[[str | None], Path]) -> None:
    path = saved(None)
    with pytest.raises(TemplateError, match=rf"{path} has no chat template: .* template 'plain'"):
        load_codec(path)
    with pytest.raises(TemplateError, match="the built-in tokenizer has no chat template"):
        load_codec(template="chat")


@pytest.mark.parametrize(
    ("template", "system", "why"),
    [
        (SYSTEM_LAST, "Be brief.", "changes what was said before when the conversation goes on"),
        (FIRST_ONLY, None, "changes what was said before when the conversation goes on"),
        (LAST_ONLY, None, "changes what was said before when the conversation goes on"),
        (NUMBERED, None, "goes on after an answer in more than one way"),
        (OTHER_END, None, "goes on after an answer in more than one way"),
        (NO_END, None, "ends an answer with .*, which holds no special token"),
        (MUTE, None, "does not show what the assistant says"),
        (INSTRUCT, "Be brief.", "refuses messages of system, user .*no role system"),
        ("{{ messages[0].content.missing() }}", None, "refuses messages of user"),
    ],
)
def test_a_template_that_cannot_hold_a_conversation_is_refused_at_once(
    template: str, system: str | None, why: str, saved: Callable[[str | None], Path]
) -> None:
    path = saved(template)
    with pytest.raises(TemplateError, match=rf"the chat template of the tokenizer {path} {why}.*: \w+"):
        load_codec(path, system=system)


def test_the_same_template_without_a_system_prompt_is_fine(saved: Callable[[str | None], Path]) -> None:
    codec = load_codec(saved(SYSTEM_LAST))
    assert shown(codec, codec.encode("a", first=False, last=0).tolist()) == "</s>[INST]a[/INST]"


def test_a_role_that_the_template_refuses_is_named(saved: Callable[[str | None], Path]) -> None:
    codec = load_codec(saved(INSTRUCT))
    with pytest.raises(TemplateError, match=r"refuses messages of user, assistant, tool \(no role tool\)"):
        codec.encode([{"role": "tool", "content": "3"}], first=False)
    with pytest.raises(TemplateError, match="refuses messages of \\?"):
        codec.encode([{"content": "3"}], first=True)


def test_messages_that_end_the_answer_before_otherwise_are_refused(saved: Callable[[str | None], Path]) -> None:
    end = "{% if not loop.last and messages[loop.index]['role'] == 'tool' %}</s>{% else %}<|end|>{% endif %}\n{% endfor"
    codec = load_codec(saved(CHATML.replace("<|end|>\n{% endfor", end)))
    assert codec.encode("a", first=False, last=0)[0] == codec.end_token_id
    with pytest.raises(TemplateError, match="ends an answer otherwise when tool follows: say it in another role"):
        codec.encode([{"role": "tool", "content": "3"}], first=False)


@pytest.mark.parametrize("observation", [None, 3, {"role": "user"}, ["a"], [["role", "user"]], [{}, 1]])
def test_an_observation_of_another_kind_is_refused(observation: Any, saved: Callable[[str | None], Path]) -> None:
    for codec in (load_codec(), load_codec(saved(CHATML))):
        with pytest.raises(TypeError, match="an observation is text or messages"):
            codec.encode(observation, first=True)


def test_no_messages_are_refused(saved: Callable[[str | None], Path]) -> None:
    for codec in (load_codec(), load_codec(saved(CHATML), system="Be brief.")):
        with pytest.raises(ValueError, match="no messages"):
            codec.encode([], first=True)


def test_a_path_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerNotFound, match=r"nowhere does not exist: give a directory"):
        load_codec(tmp_path / "nowhere")
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(TokenizerNotFound, match=r"tokenizer.json does not exist: give a directory"):
        load_codec(file)
    for damage in ("{}", "{", '{"model": 3}'):
        file.write_text(damage)
        with pytest.raises(TokenizerNotFound, match="cannot be loaded: give a directory"):
            load_codec(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerNotFound, match="cannot be loaded: give a directory"):
        load_codec(tmp_path / "empty")


def test_a_directory_below_the_current_one_is_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerNotFound, match="runs/best does not exist"):
        load_codec("runs/best")


def test_options_that_mean_nothing_are_refused(saved: Callable[[str | None], Path]) -> None:
    with pytest.raises(ValueError, match="template must be 'chat' or 'plain', got 'chatml'"):
        load_codec(template="chatml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="template_options are for the template 'chat'"):
        load_codec(template_options={"enable_thinking": False})
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    path = saved(None)
    tokenizer.save_pretrained(path)
    with pytest.raises(TemplateError, match="has no eos token"):
        load_codec(path, template="plain")
