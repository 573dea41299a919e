"""KeptText: what is read again of a conversation, counted, and that the answers are those of reading everything."""

import json

import pytest

transformers = pytest.importorskip("transformers", minversion="5.19")

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from common import assert_same_bits  # noqa: E402
from test_transformers_attention import COMMON, make_model  # noqa: E402
from test_transformers_hybrid import COMMON as HYBRID_SIZES  # noqa: E402
from test_transformers_hybrid import MODELS as HYBRIDS  # noqa: E402

import w4a8  # noqa: E402
from w4a8.integrations.transformers import W4A8Cache, W4A8Config, fuse  # noqa: E402
from w4a8.integrations.transformers.kept_text import KeptText  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_gradients")
NEW = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
LONG = {"max_position_embeddings": 4096}


def make(name, folder):
    """A packed model whose layers run in one call; Gemma 3's have windows of 40 tokens, the hybrids' states."""
    if name not in HYBRIDS:
        model = make_model(name, **LONG)
        w4a8.quantize_(model, default_skip=False)
    else:
        config, sizes = HYBRIDS[name]
        config = getattr(transformers, f"{config}Config")(**{**HYBRID_SIZES, **sizes, **LONG})
        made = getattr(transformers, f"{name}ForCausalLM")(config)
        for key, parameter in made.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
            elif key.endswith("A_log"):
                torch.nn.init.uniform_(parameter, -1.0, 2.7)
        made.save_pretrained(folder)
        packed = W4A8Config(group_size=32, default_skip=False, skip=["re:.*(gate|norm)$"])
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder, dtype=torch.float32, quantization_config=packed)
    model.generation_config.eos_token_id = None
    fuse(model)
    return model


@pytest.fixture
def read(monkeypatch):
    """The numbers of tokens whose embeddings were looked up, one a forward."""
    counts, embedding = [], torch.nn.functional.embedding

    def count(ids, *args, **options):
        counts.append(ids.numel())
        return embedding(ids, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "embedding", count)
    return counts


def said(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, COMMON["vocab_size"], (1, tokens), generator=generator)


class Conversation:
    """Prompts, and a check of each answer."""

    def __init__(self, model, read):
        self.kept, self.counts = KeptText(model), read

    def ask(self, text, stable, reads):
        """The text and the answer. ``reads``: of the prompt, what must be read."""
        self.counts.clear()
        whole = self.kept.generate(text, stable, **NEW)
        steps = NEW["max_new_tokens"] - 1
        assert sum(self.counts) == reads + steps and self.kept.read == reads
        assert self.counts[-steps:] == [1] * steps
        assert self.kept.ids == whole[0, :-1].tolist() == whole[0].tolist()[: self.kept.cache.get_seq_length()]
        assert torch.equal(whole, self.kept.model.generate(text, attention_mask=torch.ones_like(text), **NEW))
        return whole


def check_bits(kept):
    """The next logits over the cache are those of a new one."""
    whole = torch.tensor([[*kept.ids, 5]])
    want = kept.model(whole, past_key_values=W4A8Cache(kept.model.config), logits_to_keep=1).logits
    assert_same_bits(kept.model(whole[:, -1:], past_key_values=kept.cache).logits, want)


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe", "Gemma3", "GptOss", "Qwen3_5", "NemotronH", "FalconH1", "Lfm2"])
def test_the_second_turn_of_2000_tokens(name, tmp_path, read):
    """Reads its new tokens and the last one of the answer, which was written, not read."""
    conversation = Conversation(make(name, tmp_path), read)
    whole = conversation.ask(said(2000, 1), 1990, reads=2000)
    whole = conversation.ask(torch.cat([whole, said(20, 2)], 1), whole.shape[1] + 15, reads=21)
    conversation.ask(torch.cat([whole, said(7, 3)], 1), whole.shape[1] + 5, reads=8)
    check_bits(conversation.kept)


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Qwen3_5", "FalconH1", "Lfm2"])
def test_a_changed_beginning(name, tmp_path, read):
    """The answer's first tokens are dropped from the next prompt, as thinking is; then the last answer is asked for
    again; then the text changes earlier than a hybrid's copy of its states."""
    conversation, hybrid = Conversation(make(name, tmp_path), read), name in HYBRIDS
    first = said(300, 1)  # 290, and 10 that ask for an answer
    whole = conversation.ask(first, 290, reads=300)
    whole[0, 304] = (whole[0, 304] + 1) % 60  # of what was written, 4 tokens are equal
    second = torch.cat([whole, said(20, 2)], 1)
    kept = 290 if hybrid else 304
    conversation.ask(second, second.shape[1] - 3, reads=second.shape[1] - kept)
    conversation.ask(second, second.shape[1] - 3, reads=3 if hybrid else 1)
    third = torch.cat([first[:, :200], said(40, 3)], 1)
    third[0, 200] = (first[0, 200] + 1) % 60
    conversation.ask(third, 0, reads=240 if hybrid else 40)
    check_bits(conversation.kept)


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Qwen3_5", "NemotronH", "FalconH1", "Lfm2"])
def test_stored(name, tmp_path, read):
    """Behind a file nothing is read again; nor before a hybrid's copy of its states."""
    conversation, other = (Conversation(make(name, tmp_path), read) for _ in range(2))
    other.kept.model = conversation.kept.model
    whole = conversation.ask(said(300, 1), 290, reads=300)
    tensors, facts = conversation.kept.state()
    safetensors.torch.save_file(tensors, tmp_path / "stored")
    other.kept.restore(safetensors.torch.load_file(tmp_path / "stored"), json.loads(json.dumps(facts)))
    other.ask(torch.cat([whole, said(20, 2)], 1), 0, reads=21)
    check_bits(other.kept)
    other.kept.restore(tensors, facts)
    whole[0, 291] = (whole[0, 291] + 1) % 60
    other.ask(whole[:, :301], 0, reads=11 if name in HYBRIDS else 10)
    check_bits(other.kept)
    other.kept.restore({}, {})
    assert other.kept.ids == [] and other.kept.cache is None


def test_of_floats(tmp_path, read):
    """Over transformers' own cache, whose windows drop tokens: a copy of them, as of states."""
    model = make_model("Gemma3")
    conversation = Conversation(model, read)
    first = said(200, 1)
    whole = conversation.ask(first, 190, reads=200)
    assert type(conversation.kept.cache) is transformers.DynamicCache
    whole = conversation.ask(torch.cat([whole, said(20, 2)], 1), whole.shape[1] + 10, reads=21)
    whole[0, -5] = (whole[0, -5] + 1) % 60
    conversation.ask(whole, 0, reads=22)  # the ten behind the copy, and the answer
    conversation.ask(first, 0, reads=200)
    assert conversation.kept.state() == ({}, {})


def test_what_is_not_kept(read, monkeypatch):
    """A static cache, and a text that failed."""
    model = make_model("Llama")
    model.generation_config.cache_implementation = "static"
    kept = KeptText(model)
    for _ in range(2):
        kept.generate(said(30, 1), **NEW)
        assert kept.read == 30 and kept.ids == [] and kept.cache is None
    model.generation_config.cache_implementation = None
    kept.generate(said(30, 1), **NEW)
    assert len(kept.ids) == 41
    with pytest.raises(ValueError, match="temperature"):
        kept.generate(said(35, 1), **{**NEW, "do_sample": True, "temperature": -1.0})
    assert kept.ids == [] and kept.cache is None
    for shape in ((1, 0), (2, 3), (4,)):
        with pytest.raises(ValueError, match=r"ids has shape .*, expected"):
            kept.generate(torch.ones(shape, dtype=torch.int64))
