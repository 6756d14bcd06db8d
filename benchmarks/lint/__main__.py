from benchmarks.lint.command import main

main()
