"""What is written on the ops and beside the rows of pictures, where there is little room."""

from functools import cached_property

from attrs import frozen

from schedlang.schedule.actions import NO_MICROBATCH
from schedlang.schedule.kinds import OF_STAGE, Kind
from schedlang.schedule.naming import Names

#: Of more stages than that, not all stand beside their rank.
_FEW_STAGES = 4


@frozen
class Labels(Names):
    """The names of a layout in pictures."""

    def label(self, unit: int) -> str:
        """The name of a microbatch or a slice where there is little room, as in a picture: `3`,
        `1.2`.
        """
        slices = self.layout.slices
        return str(unit) if slices == 1 else f"{unit // slices}.{unit % slices}"

    @property
    def label_note(self) -> str | None:
        """What a picture says about its labels, if they name slices."""
        return None if self.layout.slices == 1 else "0.1 is slice 1 of microbatch 0"

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """For each pipeline, as few letters as tell its name from the others, and its number: `d`
        and `u` of `down` and `up`, `l0` of `lane(0)`.
        """
        families = {pipeline.family for pipeline in self.layout.pipelines}
        tags = []
        for pipeline in self.layout.pipelines:
            family = pipeline.family
            number = pipeline.name.removeprefix(family).strip("()").replace(",", ".")
            lengths = range(1, len(family) + 1)
            starts = (family[:length] for length in lengths)
            short = next(
                start
                for start in starts
                if start == family
                or sum(each.startswith(start) for each in families) == 1
            )
            tags.append(f"{short}{number}")
        return tuple(tags)

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """For each stage, what tells it from the others of its rank: nothing if there is no other,
        the tag of its pipeline, or its number.
        """
        layout = self.layout
        prefixes = []
        for stage, rank in enumerate(layout.placement):
            others = [each for each in layout.stages_of(rank) if each != stage]
            pipeline = layout.pipeline_of[stage]
            is_alone = all(layout.pipeline_of[each] != pipeline for each in others)
            number = str(stage - pipeline.start)
            if not others:
                prefixes.append("")
            elif len(layout.pipelines) == 1:
                prefixes.append(number)
            else:
                tag = self.tags[layout.pipelines.index(pipeline)]
                point = "." if tag[-1].isdigit() else ""
                prefixes.append(tag if is_alone else f"{tag}{point}{number}")
        return tuple(prefixes)

    def labels(self, kind: int, stage: int, unit: int) -> list[str]:
        """What is written on an op in a row of its rank, from the longest text to the shortest:
        `4F3`, or `dF3` of several pipelines; `F3`; `3`. An optimizer step has its letter.
        """
        letters = Kind(kind).name
        prefix = self.prefixes[stage]
        if kind in OF_STAGE or unit == NO_MICROBATCH:
            update = "" if unit == NO_MICROBATCH else str(unit)
            return list(dict.fromkeys([f"{prefix}{letters}{update}", letters]))
        number = self.label(unit)
        texts = [f"{prefix}{letters}{number}", f"{letters}{number}", number]
        return list(dict.fromkeys(texts))

    @property
    def tags_note(self) -> str | None:
        """What a picture says about the tags of pipelines, if its labels begin with them."""
        if len(self.layout.pipelines) == 1:
            return None
        pairs = zip(self.tags, self.layout.pipelines, strict=True)
        return ", ".join(f"{tag} is {pipeline.name}" for tag, pipeline in pairs)

    def stages_beside(self, rank: int) -> str:
        """The stages of a rank beside its name: `stage 2`, `stages 0, 7`, `down(0), up(3)`."""
        stages = [self.stage(stage) for stage in self.layout.stages_of(rank)]
        if len(stages) > _FEW_STAGES:
            stages = [*stages[: _FEW_STAGES - 2], f"… {stages[-1]}"]
        text = ", ".join(stages)
        if len(self.layout.pipelines) > 1:
            return text
        return f"stage{'s' if len(stages) > 1 else ''} {text}"

    @cached_property
    def are_ranks(self) -> bool:
        """Whether each rank has the one stage of its number."""
        return self.layout.placement == tuple(range(len(self.layout.placement)))
