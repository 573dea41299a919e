"""Experts on the CPU beside a GPU, on a machine with one: bits, logits, loading and saving, speed of each way.

    python lab/gpu/check.py --json found.json                  # a GPU with 8 GB, some minutes
    python lab/gpu/check.py --device cuda:1 --layers 2 --threads 15

Not run on a GPU yet. Needs w4a8, transformers 5 and accelerate. A wrong result ends the program with an error; each
figure is printed, and written to the file, as soon as it is there.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

import w4a8
from w4a8.command import machine
from w4a8.core import bridge
from w4a8.integrations.transformers import W4A8Config
from w4a8.nn import W4A8Experts

LAYERS_OF_QWEN = 48  # of Qwen3-30B-A3B, to which the time of a layer is scaled
SCALE = 2.0**-8  # of all weights: a power of two, so that bfloat16 holds the same weights


class Check:
    """The checks, for one device.

    Args:
        device: the accelerator.
        small: sizes with which everything is done within seconds.
        layers: of the model whose speed is measured.
        say: called with the name and the value of each finding.
    """

    def __init__(self, device: torch.device, small: bool, layers: int, say: Callable[[str, Any], None]) -> None:
        self.device, self.small, self.say = device, small, say
        self.torch = getattr(torch, device.type)
        self.layers = layers
        self.experts, self.hidden, self.inter, self.top = (8, 128, 64, 2) if small else (128, 2048, 768, 8)
        self.tokens = (1, 3, 40) if small else (1, 8, 64, 512, 2048, 5000)

    def wait(self) -> None:
        """Until the device has done everything."""
        if hasattr(self.torch, "synchronize"):
            self.torch.synchronize(self.device)

    def time(self, call: Callable[[], object], seconds: float = 1.0) -> float:
        """Microseconds of a call, the device idle before: the median."""
        found: list[float] = []
        call()
        end = time.perf_counter() + (0 if self.small else seconds)
        while len(found) < 3 or time.perf_counter() < end:
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            found.append(1e6 * (time.perf_counter() - begin))
        return round(sorted(found)[len(found) // 2], 1)

    def random_experts(self, seed: int) -> tuple[W4A8Experts, list[torch.Tensor]]:
        """A layer of experts, and the same weights in bfloat16, gate and up rows and down rows."""
        generator = torch.Generator().manual_seed(seed)
        packed, floats = [], []
        for rows, columns in ((2 * self.inter, self.hidden), (self.hidden, self.inter)):
            codes = torch.randint(256, (self.experts, rows, columns // 2), dtype=torch.uint8, generator=generator)
            scales = torch.full((self.experts, rows, columns // 32), SCALE, dtype=torch.bfloat16)
            packed.append(w4a8.dyn_quant_pack_4bit_weight(codes, scales, None, 32, columns, rows, activation_group=32))
            both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)  # the low nibble is the even column
            floats.append((both.to(torch.int8) - 8).bfloat16() * SCALE)
        return W4A8Experts(*packed, self.hidden, self.inter, 32), floats

    def inputs(self, tokens: int, seed: int = 1) -> list[torch.Tensor]:
        """Of a layer of experts, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, self.hidden, generator=generator).bfloat16()
        ids = torch.rand(tokens, self.experts, generator=generator).topk(self.top).indices
        return [x, ids, torch.rand(tokens, self.top, generator=generator)]

    def there(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors on the device."""
        return [tensor.to(self.device) for tensor in tensors]

    def environment(self) -> None:
        """What this was run on, and how fast memory is copied."""
        self.say("CPU", f"{machine.cpu_model()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads")
        self.say(
            "versions", f"w4a8 {w4a8.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
        )
        self.say("kernel", w4a8.active_kernel())
        self.say("devices", machine.accelerators())
        if not self.small:
            self.say("copies", machine.copy_speeds(str(self.device)))

    def ways(self) -> Iterator[str]:
        """Each way to call the experts that this machine has; it is taken until the next."""
        for way in bridge.WAYS:
            if way == "queued" and not bridge.launcher(self.device):
                self.say("queued", "there is no driver of CUDA")
                continue
            os.environ[bridge.WAY] = way
            bridge._bridges.clear()
            yield way

    @torch.no_grad()
    def layer(self) -> None:
        """One layer: bits of all ways to call it, and microseconds alone, in each way, and with simple copies."""
        layers = [self.random_experts(seed)[0] for seed in range(4)]
        turn = iter(range(1 << 30))  # another layer each time: weights come from memory
        for tokens in self.tokens:
            here = self.inputs(tokens)
            there = self.there(here)

            def alone(here: list[torch.Tensor] = here) -> torch.Tensor:
                return layers[next(turn) % 4](*here)

            def bridged(there: list[torch.Tensor] = there) -> torch.Tensor:
                return layers[next(turn) % 4](*there)

            def copied(there: list[torch.Tensor] = there) -> torch.Tensor:
                return layers[next(turn) % 4](*(each.cpu() for each in there)).to(self.device)

            row = {"alone": self.time(alone), "simple copies": self.time(copied)}
            for way in self.ways():
                for each in layers:
                    assert torch.equal(each(*there).cpu(), each(*here)), f"bits of {tokens} tokens, {way}"
                row[way] = self.time(bridged)
            self.say(f"us of a layer, {tokens} tokens", row)
        self.say("bits of a layer", "equal to the CPU's")
        for way in self.ways():
            self._at_once(layers, way)

    def _at_once(self, layers: list[W4A8Experts], way: str) -> None:
        """Streams in turns, and threads that share a stream."""
        given = [self.inputs(3, seed) for seed in range(40)]
        there = [self.there(each) for each in given]
        want = [layers[i % 4](*each) for i, each in enumerate(given)]
        self.wait()
        if hasattr(self.torch, "Stream"):
            streams, got = [self.torch.Stream(self.device) for _ in range(2)], []
            for i, each in enumerate(there):
                with self.torch.stream(streams[i % 2]):
                    got.append(layers[i % 4](*each))
            self.wait()
            assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(got, want)), "streams"
            self.say(f"two streams, {way}", "equal")
        made: list[Any] = [None] * len(there)

        def some(first: int) -> None:
            with torch.no_grad():
                for i in range(first, len(there), 4):
                    made[i] = layers[i % 4](*there[i]).cpu()

        threads = [threading.Thread(target=some, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, want)), "threads"
        self.say(f"four threads, {way}", "equal")

    def config(self, layers: int, vocabulary: int) -> Qwen3MoeConfig:
        """Of a model with these experts."""
        heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        if self.small:
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        return Qwen3MoeConfig(
            hidden_size=self.hidden, intermediate_size=2 * self.hidden, moe_intermediate_size=self.inter,
            num_experts=self.experts, num_experts_per_tok=self.top, num_hidden_layers=layers, vocab_size=vocabulary,
            max_position_embeddings=8192, norm_topk_prob=True, **heads,
        )  # fmt: skip

    @torch.no_grad()
    def loading(self) -> None:
        """from_pretrained with device_map, logits and text beside the CPU's, and what is saved."""
        options = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
        tokens = torch.randint(512, (2, 20), generator=torch.Generator().manual_seed(5))
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(1)
            Qwen3MoeForCausalLM(self.config(2, 512)).bfloat16().save_pretrained(f"{folder}/floats")
            how = {"quantization_config": W4A8Config(skip="re:.*self_attn.*"), **options}
            cpu = AutoModelForCausalLM.from_pretrained(f"{folder}/floats", **how)
            model = AutoModelForCausalLM.from_pretrained(f"{folder}/floats", device_map=str(self.device), **how)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                assert (tensor.device.type == "cpu") == name.endswith("_packed"), f"{name} is on {tensor.device}"
            got, want = model(tokens.to(self.device)).logits.cpu().float(), cpu(tokens).logits.float()
            error = ((got - want).norm() / want.norm()).item()
            texts = [
                each.generate(tokens.to(each.device), max_new_tokens=8, do_sample=False).cpu() for each in (model, cpu)
            ]
            self.say("loaded", {"relative error": round(error, 5), "same text": torch.equal(*texts)})
            assert error < 0.05, "logits differ from the CPU's"
            if self.device.type != "standin":  # which has no storage to write
                model.save_pretrained(f"{folder}/saved")
                again = AutoModelForCausalLM.from_pretrained(f"{folder}/saved", **options)
                assert torch.equal(again(tokens).logits.float(), want), "saved and loaded again"
                self.say("saved and loaded again", "same bits")
            assert torch.equal(model.to("cpu")(tokens).logits.float(), want), "moved back to the CPU"
            self.say("moved back to the CPU", "same bits")

    @torch.no_grad()
    def speed(self) -> None:
        """Tokens per second of a model of few layers, scaled: experts there in bfloat16, beside, all on the CPU."""
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(self.config(self.layers, 512)).bfloat16().eval().requires_grad_(False)
        packed = []
        for number, layer in enumerate(model.model.layers):
            experts, floats = self.random_experts(number)
            layer.mlp.experts.gate_up_proj.copy_(floats[0])
            layer.mlp.experts.down_proj.copy_(floats[1])
            packed.append(experts)
        if not self.small:
            self._decode("experts there, bfloat16", model.to(self.device))
        for layer, experts in zip(model.model.layers, packed):
            layer.mlp.experts = experts
        on_cpu = copy.deepcopy(model.to("cpu"))
        w4a8.nn.beside(model, self.device)
        for way in self.ways():
            self._decode(f"experts beside, {way}", model)
        self._decode("all on the CPU (int4 experts, bfloat16)", on_cpu)

    def _decode(self, name: str, model: Any) -> None:
        for prompt in (16,) if self.small else (128, 2048):
            tokens = torch.randint(512, (1, prompt), generator=torch.Generator().manual_seed(prompt)).to(model.device)
            for _ in range(2):  # the first is to warm up
                cache, times = DynamicCache(config=model.config), []
                for _ in range(3 if self.small else 33):
                    begin = time.perf_counter()
                    logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                    tokens = logits[:, -1:].argmax(-1)
                    tokens.cpu()
                    times.append(time.perf_counter() - begin)
                tokens = torch.randint(512, (1, prompt)).to(model.device)
            step = sorted(times[1:])[len(times) // 2] / self.layers
            row = {"prompt, tokens/s": prompt / times[0] * self.layers / LAYERS_OF_QWEN, "us of a layer": 1e6 * step}
            row["tokens/s"] = 1 / (step * LAYERS_OF_QWEN)
            self.say(
                f"{name}, prompt of {prompt}, {LAYERS_OF_QWEN} layers", {key: round(x, 1) for key, x in row.items()}
            )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs all checks; returns what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the program")
    parser.add_argument("--layers", type=int, default=4, help="of the model whose speed is measured")
    parser.add_argument("--threads", type=int, help="of torch: try one less than there are cores")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    found: dict[str, Any] = {}

    def say(name: str, value: Any) -> None:
        found[name] = value
        print(f"{name}: {value}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")

    check = Check(torch.device(args.device), args.small, args.layers, say)
    for stage in (check.environment, check.layer, check.loading, check.speed):
        begin = time.perf_counter()
        stage()
        say(f"seconds of {stage.__name__}", round(time.perf_counter() - begin, 1))
    return found


if __name__ == "__main__":
    main()
