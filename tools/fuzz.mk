# The planner's fuzz target, built with clang into build/fuzz; see fuzz.sh.
SOURCES := $(wildcard csrc/core/common/*.cpp csrc/core/layout/*.cpp csrc/core/plan/*.cpp csrc/core/plan/*/*.cpp) tests/fuzz/plan_fuzz.cpp
OBJECTS := $(SOURCES:%.cpp=build/fuzz/%.o)
FLAGS := -std=c++20 -O1 -g1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Icsrc/core -isystem $(FMT) -MMD

build/fuzz/plan_fuzz: $(OBJECTS)
	$(CXX) $(FLAGS) $^ -o $@

build/fuzz/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) -c $< -o $@

-include $(OBJECTS:.o=.d)
