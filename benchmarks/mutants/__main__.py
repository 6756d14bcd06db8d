from benchmarks.mutants.command import main

main()
