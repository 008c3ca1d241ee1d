//! Templates and values become text.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};

use super::{
    functions,
    parse::{self, Expression, Node, Pipeline, Templates},
    value::Value,
};

/// Most templates that include one another: charts have a handful, and each takes stack.
const DEEPEST: usize = 64;

/// What templates may use beside values.
pub(super) struct Renderer<'a> {
    pub(super) templates: &'a Templates,
    /// Files of the chart that are no templates, by their paths.
    pub(super) files: &'a BTreeMap<String, String>,
}

/// The dot and the variables in force, the innermost last.
struct Scope {
    variables: Vec<(String, Value)>,
    depth: usize,
}

impl Scope {
    fn variable(&self, name: &str) -> Result<Value> {
        let found = self.variables.iter().rev().find(|(known, _)| known == name);
        found.map(|(_, value)| value.clone()).with_context(|| format!("${name} is not declared"))
    }
}

impl Renderer<'_> {
    /// The text of a template.
    ///
    /// # Errors
    /// When a function fails, the chart's own `fail` and `required` included.
    pub(super) fn render(&self, template: &str, dot: &Value) -> Result<String> {
        self.include(template, dot, 0)
    }

    fn include(&self, template: &str, dot: &Value, depth: usize) -> Result<String> {
        let nodes = self.templates.get(template).with_context(|| format!("there is no template {template}"))?;
        self.text(template, nodes, dot, depth)
    }

    /// The text of a template that is a value.
    fn tpl(&self, source: &str, dot: &Value, depth: usize) -> Result<String> {
        const NAME: &str = "tpl";
        let mut templates = Templates::new();
        parse::file(NAME, source, &mut templates)?;
        let nodes = templates.remove(NAME).unwrap_or_default();
        if !templates.is_empty() {
            bail!("define is not supported in {NAME}: {source}");
        }
        self.text(NAME, &nodes, dot, depth)
    }

    fn text(&self, name: &str, nodes: &[Node], dot: &Value, depth: usize) -> Result<String> {
        if depth > DEEPEST {
            bail!("{name}: more than {DEEPEST} templates include one another");
        }
        let mut scope = Scope { variables: vec![(String::new(), dot.clone())], depth };
        let mut text = String::new();
        self.nodes(nodes, dot, &mut scope, &mut text)?;
        Ok(text)
    }

    fn nodes(&self, nodes: &[Node], dot: &Value, scope: &mut Scope, text: &mut String) -> Result<()> {
        nodes.iter().try_for_each(|node| self.node(node, dot, scope, text))
    }

    fn node(&self, node: &Node, dot: &Value, scope: &mut Scope, text: &mut String) -> Result<()> {
        let before = scope.variables.len();
        match node {
            Node::Text(verbatim) => text.push_str(verbatim),
            Node::Print(pipeline) => {
                let value = self.pipeline(pipeline, dot, scope)?;
                if pipeline.variable.is_none() {
                    text.push_str(&value.to_string());
                }
                // Its variable lives until the end of the block around it.
                return Ok(());
            }
            Node::If { condition, then, otherwise } => {
                let is = self.pipeline(condition, dot, scope)?.is_true();
                self.nodes(if is { then } else { otherwise }, dot, scope, text)?;
            }
            Node::With { value, then, otherwise } => {
                let value = self.pipeline(value, dot, scope)?;
                match value.is_true() {
                    true => self.nodes(then, &value, scope, text)?,
                    false => self.nodes(otherwise, dot, scope, text)?,
                }
            }
            Node::Range { key, value, over, each, otherwise } => {
                let entries = entries(self.pipeline(over, dot, scope)?)?;
                if entries.is_empty() {
                    self.nodes(otherwise, dot, scope, text)?;
                }
                for (name, element) in entries {
                    scope.variables.truncate(before);
                    scope.variables.extend(key.iter().map(|key| (key.clone(), name.clone())));
                    scope.variables.extend(value.iter().map(|value| (value.clone(), element.clone())));
                    self.nodes(each, &element, scope, text)?;
                }
            }
        }
        scope.variables.truncate(before);
        Ok(())
    }

    fn pipeline(&self, pipeline: &Pipeline, dot: &Value, scope: &mut Scope) -> Result<Value> {
        let mut value = None;
        for command in &pipeline.commands {
            value = Some(self.expression(command, value, dot, scope)?);
        }
        let value = value.unwrap_or_default();
        match &pipeline.variable {
            None => {}
            Some(variable) if variable.declared => scope.variables.push((variable.name.clone(), value.clone())),
            Some(variable) => {
                let known = scope.variables.iter_mut().rev().find(|(name, _)| *name == variable.name);
                let (_, known) = known.with_context(|| format!("${} is not declared", variable.name))?;
                known.clone_from(&value);
            }
        }
        Ok(value)
    }

    /// `last` is the value of the command before.
    fn expression(&self, of: &Expression, last: Option<Value>, dot: &Value, scope: &mut Scope) -> Result<Value> {
        if last.is_some() && !matches!(of, Expression::Call(..) | Expression::Method(..)) {
            bail!("a pipeline ends in something that is not a function");
        }
        Ok(match of {
            Expression::Dot => dot.clone(),
            Expression::Nil => Value::Nil,
            Expression::Bool(is) => Value::Bool(*is),
            Expression::Int(number) => Value::Int(*number),
            Expression::Float(number) => Value::Float(*number),
            Expression::Text(text) => Value::text(text.as_str()),
            Expression::Variable(name) => scope.variable(name)?,
            Expression::Field(of, name) => match self.expression(of, None, dot, scope)? {
                // As in Go: a field of nothing is a mistake in the chart or in the values.
                Value::Map(map) => map.borrow().get(name).cloned().unwrap_or_default(),
                other => bail!("{name} is asked of {}, expected a map", other.kind()),
            },
            Expression::Pipeline(inner) => self.pipeline(inner, dot, scope)?,
            Expression::Call(name, arguments) => self.call(name, arguments, last, dot, scope)?,
            Expression::Method(_, name, arguments) => {
                let arguments = self.arguments(arguments, last, dot, scope)?;
                let [Value::Text(path)] = arguments.as_slice() else { bail!("{name} takes a path") };
                if name != "Get" {
                    bail!("{name} is not supported, only .Files.Get");
                }
                Value::text(self.files.get(path.as_ref()).map_or("", String::as_str))
            }
        })
    }

    fn arguments(&self, of: &[Expression], last: Option<Value>, dot: &Value, scope: &mut Scope) -> Result<Vec<Value>> {
        let mut values = of.iter().map(|of| self.expression(of, None, dot, scope)).collect::<Result<Vec<_>>>()?;
        values.extend(last);
        Ok(values)
    }

    fn call(
        &self,
        name: &str,
        arguments: &[Expression],
        last: Option<Value>,
        dot: &Value,
        scope: &mut Scope,
    ) -> Result<Value> {
        // These two stop at the first argument that decides.
        if let Some(decides) = match name {
            "and" => Some(false),
            "or" => Some(true),
            _ => None,
        } {
            let mut value = Value::Nil;
            for argument in arguments {
                value = self.expression(argument, None, dot, scope)?;
                if value.is_true() == decides {
                    return Ok(value);
                }
            }
            return Ok(last.unwrap_or(value));
        }
        let values = self.arguments(arguments, last, dot, scope)?;
        let depth = scope.depth + 1;
        match (name, values.as_slice()) {
            ("include", [Value::Text(template), dot]) => self.include(template, dot, depth).map(Value::text),
            ("tpl", [Value::Text(source), dot]) => self.tpl(source, dot, depth).map(Value::text),
            ("include" | "tpl", _) => bail!("{name} takes a text and a value"),
            (name, values) => functions::call(name, values),
        }
    }
}

/// What `range` goes through: keys or indices, and values.
fn entries(value: Value) -> Result<Vec<(Value, Value)>> {
    Ok(match value {
        Value::Nil => Vec::new(),
        Value::List(items) => (0..).zip(items.iter()).map(|(index, item)| (Value::Int(index), item.clone())).collect(),
        Value::Map(map) => map.borrow().iter().map(|(key, value)| (Value::text(key.as_str()), value.clone())).collect(),
        other => bail!("range over {}, expected a list or a map", other.kind()),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::parse, *};

    fn render(source: &str) -> Result<String> {
        let mut templates = Templates::new();
        parse::file("test", source, &mut templates)?;
        let files = [("f.json".to_owned(), "[1]".to_owned())].into();
        let values = json!({"a": 1, "empty": {}, "list": ["x", "y"], "map": {"k": "v", "b": 2}});
        Renderer { templates: &templates, files: &files }.render("test", &Value::from(values))
    }

    /// What helm prints for the same template and values.
    #[test]
    fn blocks_variables_and_pipelines_are_gos() {
        for (source, expected) in [
            ("{{ .a }}{{ .absent }}", "1"),
            ("{{ if .empty }}x{{ else if .a }}y{{ else }}z{{ end }}", "y"),
            ("{{ with .map.k }}{{ . }}{{ $.a }}{{ else }}no{{ end }}", "v1"),
            ("{{ with .empty }}yes{{ else }}{{ .a }}{{ end }}", "1"),
            ("{{ range $i, $x := .list }}{{ $i }}{{ $x }},{{ end }}", "0x,1y,"),
            ("{{ range $k, $v := .map }}{{ $k }}={{ $v }};{{ end }}", "b=2;k=v;"),
            ("{{ range .empty }}x{{ else }}none{{ end }}", "none"),
            ("{{ $x := 1 }}{{ if true }}{{ $x = 2 }}{{ $y := 3 }}{{ end }}{{ $x }}", "2"),
            ("{{ $x := 1 }}{{ if true }}{{ $x := 2 }}{{ end }}{{ $x }}", "1"),
            ("{{ define \"t\" }}<{{ .k }}>{{ end }}{{ include \"t\" .map | upper }}", "<V>"),
            ("{{ (dict \"a\" (list 1 2)).a }}", "[1 2]"),
            ("{{ define \"t\" }}<{{ . }}>{{ end }}{{ tpl `{{ include \"t\" .k }}{{ $.b }}` .map }}", "<v>2"),
            ("{{ tpl `` . }}-", "-"),
            ("{{ and 0 (fail \"no\") }}{{ or 1 (fail \"no\") }}", "01"),
            ("{{ $.Files.Get \"f.json\" | fromJsonArray }}", "[1]"),
        ] {
            let source = source.replace("$.Files.Get", "(dict \"Files\" dict).Files.Get");
            assert_eq!(render(&source).unwrap(), expected, "{source}");
        }
    }

    #[test]
    fn mistakes_are_errors() {
        for (source, words) in [
            ("{{ $x }}", "$x is not declared"),
            ("{{ .a.b }}", "b is asked of float64"),
            ("{{ include \"t\" . }}", "no template t"),
            ("{{ nosuch 1 }}", "nosuch"),
            ("{{ define \"t\" }}{{ include \"t\" . }}{{ end }}{{ include \"t\" . }}", "include one another"),
            ("{{ tpl `{{ if }` . }}", "tpl: unexpected"),
            ("{{ tpl .a . }}", "tpl takes a text"),
            ("{{ tpl `{{ define \"t\" }}{{ end }}` . }}", "define is not supported"),
            ("{{ $t := `{{ tpl . . }}` }}{{ tpl $t $t }}", "include one another"),
            ("{{ if true }}", "does not end"),
            ("{{ end }}", "end without a beginning"),
        ] {
            let error = format!("{:#}", render(source).unwrap_err());
            assert!(error.contains(words), "{source}: {error}");
        }
    }
}
