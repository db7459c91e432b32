"""Text models: embeddings, classification, tagging and question answering, batched by token length."""

from edgeds.pipelines.bert.answer import Answer
from edgeds.pipelines.bert.classify import Label
from edgeds.pipelines.bert.head import TEXT_TASKS, TextHead, choose_head
from edgeds.pipelines.bert.pipeline import BertPipeline, TextCounts
from edgeds.pipelines.bert.tag import Entity

__all__ = ["TEXT_TASKS", "Answer", "BertPipeline", "Entity", "Label", "TextCounts", "TextHead", "choose_head"]
