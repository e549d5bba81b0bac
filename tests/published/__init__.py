"""The published steps, each written anew in plain torch: `course_utils.benchmark.published` has the figures."""
