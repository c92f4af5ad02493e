"""Jobs without a launcher."""

import uuid

from launch.spec import JobSpec, spec_file


def saved(spec: JobSpec) -> str:
    return spec.save(spec_file(spec.run_dir, uuid.uuid4().hex))
